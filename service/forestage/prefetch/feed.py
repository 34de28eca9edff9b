"""Lets listeners on the event loop follow what comes into the pool and leaves it, each at its own pace.

Law: a listener that is slow costs a place in a bounded log and at most one list of what is resident, never more; it
loses its place, is told so, and begins anew with what is resident then.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import StrEnum

from forestage.core.errors import CapacityError
from forestage.core.residency import Place, Residency, ResidencyEvent

__all__ = ["Changes", "Channel", "ResidencyFeed", "Snapshot"]

_EVENTS_AT_ONCE = 512
_RETRY_AFTER_S = 5.0


class Channel(StrEnum):
    """By which way a listener passes on what it hears."""

    HTTP = "http"  # a client of GET /v1/events
    ZMQ = "zmq"  # the publisher of this service, of which there is one at most


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is resident as of event number `next`. `lost` says that the listener has missed events before it."""

    next: int
    lost: bool
    pages: list[tuple[Place, list[bytes]]]


@dataclass(frozen=True, slots=True)
class Changes:
    """What happened since, in order, up to but without event number `next`. Empty: nothing did for a while."""

    next: int
    events: list[ResidencyEvent]


class ResidencyFeed:
    """At most `max_listeners` at once by HTTP; the publisher always has room.

    `told` counts the events that were handed to listeners, once for each of them, and `lost` those that listeners
    missed because they were too slow.
    """

    def __init__(self, log: Residency, max_listeners: int = 16) -> None:
        self.log = log
        self._max_listeners = max_listeners
        self._news: dict[asyncio.Event, Channel] = {}
        self._closed = False
        self.told = dict.fromkeys(Channel, 0)
        self.lost = dict.fromkeys(Channel, 0)

    def count_listeners(self, channel: Channel) -> int:
        """Count who listens now."""
        return list(self._news.values()).count(channel)

    def require_room(self) -> None:
        """Raise CapacityError if there are as many listeners as there may be."""
        if self.count_listeners(Channel.HTTP) >= self._max_listeners:
            raise CapacityError(
                f"{self._max_listeners} listeners are there already",
                slug="too-many-listeners",
                retry_after_s=_RETRY_AFTER_S,
            )

    def wake(self) -> None:
        """Have listeners look for events: the engine has taken a step."""
        for news in self._news:
            news.set()

    def close(self) -> None:
        """End what every listener follows. Idempotent."""
        self._closed = True
        self.wake()

    async def follow(
        self, since: int | None, idle_s: float, channel: Channel = Channel.HTTP
    ) -> AsyncGenerator[Snapshot | Changes, None]:
        """Yield what happens from event `since` on, or all that is resident first if that is not known any more.

        Every `idle_s` seconds without an event an empty Changes comes. Close it (`aclosing`) to stop listening; it ends
        by itself with the service. Raises CapacityError.
        """
        if channel is Channel.HTTP:
            self.require_room()
        news = asyncio.Event()
        self._news[news] = channel
        self.log.listen()
        try:
            at = since
            while not self._closed:
                news.clear()
                events = None if at is None else self.log.read(at, _EVENTS_AT_ONCE)
                if events is None:
                    lost, at = at is not None, self._begin_anew(at, channel)
                    yield Snapshot(at, lost, list(self.log.resident()))
                elif events:
                    self.told[channel] += len(events)
                    at = (at or 0) + len(events)
                    yield Changes(at, events)
                else:
                    try:
                        async with asyncio.timeout(idle_s):
                            await news.wait()
                    except TimeoutError:
                        yield Changes(at or 0, [])
        finally:
            self.log.leave()
            del self._news[news]

    def _begin_anew(self, at: int | None, channel: Channel) -> int:
        """Return where a listener that was at `at` goes on behind a snapshot, and count what it missed."""
        log = self.log
        if at is not None and log.began <= at < log.next:
            self.lost[channel] += log.next - at
        return log.next
