"""What comes into the fake's pools and leaves them, as lines of a stream of events.

Law: `changes[n]` is event number n + 1; added up they are what was resident when `look` was last called.
"""

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from forestage_client._errors import NotFound
from forestage_client._fake_pool import FakePool

__all__ = ["FakeEvents"]


class _Change(NamedTuple):
    event: str
    model: str
    component: str
    key: bytes


class FakeEvents:
    """Keeps all events since the beginning."""

    def __init__(self, pools: Mapping[str, FakePool]) -> None:
        self._pools = pools
        self._resident: dict[tuple[str, str], set[bytes]] = {}
        self._changes: list[_Change] = []

    @property
    def number(self) -> int:
        """The number of the last event."""
        return len(self._changes)

    def look(self) -> None:
        """Take note of what has changed. O(resident)."""
        for model, pool in self._pools.items():
            for shelf in pool.shelves:
                before = self._resident.get((model, shelf.component.name), set())
                now = set(shelf.resident)
                for event, keys in (("removed", before - now), ("stored", now - before)):
                    self._changes += [_Change(event, model, shelf.component.name, key) for key in sorted(keys)]
                self._resident[model, shelf.component.name] = now

    def require(self, model: str | None) -> None:
        """Raise NotFound for a model that is not configured."""
        if model is not None and model not in self._pools:
            raise NotFound(f"no model {model!r}", slug="unknown-model")

    def begin(self, last_id: str | None, model: str | None) -> tuple[int, str]:
        """Return after which number to go on, and what to say first: nothing, or all that is resident."""
        if last_id is not None:
            number = last_id.removeprefix("fake.")
            if number != last_id and number.isdecimal() and int(number) <= self.number:
                return int(number), ""
        parts = [_message("gap", {})] if last_id is not None else []
        parts.append(_message("reset", {"instance": "fake", "generation": 1}))
        for (name, component), keys in self._resident.items():
            if keys and model in (None, name):
                named = {"model": name, "component": component, "keys": sorted(key.hex() for key in keys)}
                parts.append(_message("stored", named))
        return self.number, "".join([*parts, _message("ready", {}, self.number)])

    def after(self, number: int, model: str | None) -> Iterator[str]:
        """Yield the events behind a number."""
        for at, change in enumerate(self._changes[number:], number + 1):
            if model in (None, change.model):
                named = {"model": change.model, "component": change.component, "keys": [change.key.hex()]}
                yield _message(change.event, named, at)


def _message(event: str, data: Mapping[str, object], number: int | None = None) -> str:
    head = "" if number is None else f"id: fake.{number}\n"
    return f"{head}event: {event}\ndata: {json.dumps(data)}\n\n"
