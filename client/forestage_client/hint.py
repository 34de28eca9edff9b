"""One wish of an envelope for `Client.hints`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from forestage_client._codec import Encoding, Keys, encode_fields

__all__ = ["Hint"]


@dataclass(frozen=True, slots=True)
class Hint:
    """An action: "prefetch", "pin", "retain", "expect", "demote", with `model` and `keys`, or "release".

    Args:
        action_type: what to do.
        model: whose pages; None for a release.
        keys: of the prefix, or a Prompt.
        options: further members of the payload, as docs/api.md names them: `ttl_ms`, `deadline_ms`, `pin_id` and so on.
        action_id: names the action in the answer; "" for its number among those of the envelope, from 0.
        action_version: of the action's form.
    """

    action_type: str
    model: str | None = None
    keys: Keys | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    action_id: str = ""
    action_version: str = "1.0"

    def describe(self, place: int, encoding: Encoding) -> dict[str, object]:
        """Return the action as it is sent, the one at `place` of its envelope. Raises BadRequest for bad keys."""
        named = {} if self.model is None else {"model": self.model}
        return {
            "action_id": self.action_id or str(place),
            "action_type": self.action_type,
            "action_version": self.action_version,
            "payload": encode_fields({**named, **self.options}, self.keys, encoding),
        }
