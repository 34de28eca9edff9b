"""What `GET /v1/events` sends, line by line, and where to go on after a broken stream.

Law: `last_id` is that of the last event that had one; whoever comes back with it misses nothing, or is told `gap`.
"""

import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from forestage_client._errors import ForestageError, ServerFault
from forestage_client._types import PoolEvent

__all__ = ["EventLines", "Returning"]

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


class EventLines:
    """Puts lines together to events."""

    def __init__(self, last_id: str | None) -> None:
        self.last_id = last_id
        self._event, self._id, self._data = "", "", "{}"

    def begin(self) -> None:
        """Forget the half of an event that a broken stream left."""
        self._event, self._id, self._data = "", "", "{}"

    def take(self, line: str) -> PoolEvent | None:
        """Take in one line; return the event that it ends. Raises ServerFault."""
        if line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "event":
                self._event = value
            elif name == "id":
                self._id = value
            elif name == "data":
                self._data = value
            return None
        event, number, data = self._event, self._id, self._data
        self.begin()
        if not event:
            return None
        read = _read(event, number or None, data)
        self.last_id = number or self.last_id
        return read


class Returning:
    """When to come back after a stream broke, and when to give up: `seconds` after it last brought anything."""

    def __init__(self, model: str | None, last_id: str | None, seconds: float) -> None:
        self.lines = EventLines(last_id)
        self._model = model
        self._seconds = seconds
        self._pause_s = _FIRST_PAUSE_S
        self._since: float | None = None
        self._has_begun = False

    @property
    def path(self) -> str:
        """What to ask for."""
        return "/v1/events" + (f"?{urlencode({'model': self._model})}" if self._model is not None else "")

    @property
    def headers(self) -> dict[str, str]:
        """What to say beside it: where to go on."""
        accept = {"accept": "text/event-stream"}
        return accept if self.lines.last_id is None else {**accept, "last-event-id": self.lines.last_id}

    def brought(self) -> None:
        """Take note that something came."""
        self._has_begun = True
        self._since = None
        self._pause_s = _FIRST_PAUSE_S

    def pause_after(self, error: ForestageError) -> float:
        """Return how many seconds to wait before the next try; raise the error if it is time to give up."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        # 1. a refusal that no waiting changes; 2. it never was there; 3. away for too long
        if error.status is not None and error.status not in {429, 503}:
            raise error
        if not self._has_begun or now - self._since >= self._seconds:
            raise error
        self.lines.begin()
        pause_s = max(self._pause_s, min(error.retry_after_s or 0.0, _LONGEST_PAUSE_S))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s


def _read(event: str, number: str | None, data: str) -> PoolEvent:
    try:
        members = json.loads(data)
        if not isinstance(members, dict):
            raise ValueError("data must be an object")
        return _event_of(event, number, members)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ServerFault(f"GET /v1/events: unreadable event {event[:40]!r}: {error!r}", status=200) from error


def _event_of(event: str, number: str | None, members: Mapping[str, Any]) -> PoolEvent:
    if event in {"stored", "removed"}:
        keys = tuple(bytes.fromhex(key) for key in members["keys"])
        return PoolEvent(event, number, str(members["model"]), str(members["component"]), keys)
    if event == "reset":
        return PoolEvent(event, number, instance=str(members["instance"]), generation=int(members["generation"]))
    return PoolEvent(event, number)
