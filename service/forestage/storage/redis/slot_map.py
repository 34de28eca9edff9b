"""The distribution of a cluster's hash slots, as CLUSTER SLOTS tells it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forestage.storage.redis.door import Address
from forestage.storage.redis.errors import DesyncError

__all__ = ["NUM_SLOTS", "SlotRange", "parse_slots"]

NUM_SLOTS = 16384


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Slots `first` to `last`, both included, and the primary that has them."""

    first: int
    last: int
    primary: Address


def parse_slots(reply: Any, asked: Address) -> Sequence[SlotRange]:
    """Read the reply of the node at `asked`, whose host stands in for a host that it does not know of itself.

    Raises DesyncError for a reply of another form.
    """
    try:
        ranges = []
        for first, last, (host, port, *_), *_ in reply:
            text = host.decode() if host else ""
            primary = (text if text not in ("", "?") else asked[0]), int(port)
            if not 0 <= first <= last < NUM_SLOTS:
                raise ValueError("slots out of range")
            ranges.append(SlotRange(first, last, primary))
    except (TypeError, ValueError, AttributeError) as error:
        raise DesyncError(f"what CLUSTER SLOTS answered makes no sense: {error}") from error
    return ranges
