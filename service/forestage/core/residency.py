"""What comes into the pool and leaves it, one event a page and component, for those who listen.

Law: while somebody listens, the events have consecutive sequence numbers, the last `capacity` of them can be read, and
`resident` of a place is what is in the index there, as of event `next`. While nobody does, nothing is recorded or kept,
and no page costs anything: the recorders are not in the way. A number from before such a time is never read again.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from forestage.core.model_pool import ModelPool
from forestage.core.slots import SlotEvents

__all__ = ["Place", "Residency", "ResidencyEvent"]


class Place(NamedTuple):
    """Where a page is resident: by model and component."""

    model: str
    component: str


class ResidencyEvent(NamedTuple):
    """A page became resident (`stored`), or is resident no more."""

    stored: bool
    place: Place
    key: bytes


class Residency:
    """The changes of some pools, by model. Called by the engine's thread, between its steps."""

    def __init__(self, pools: Mapping[str, ModelPool], capacity: int = 65536) -> None:
        """Record nothing yet; `capacity` is in events."""
        self._pools = pools
        self._ring: list[ResidencyEvent | None] = []
        self._capacity = capacity
        self._first = 0  # of this time of listening
        self._recorders: dict[str, list[_Recorder]] = {}
        self._before: dict[str, Sequence[SlotEvents]] = {}
        self.listeners = 0
        self.next = 0

    @property
    def oldest(self) -> int:
        """The sequence number of the oldest event that can be read."""
        return max(self._first, self.next - self._capacity)

    @property
    def began(self) -> int:
        """The first number of this time of listening; what happened before it had none."""
        return self._first

    def listen(self) -> None:
        """Begin to record, if nobody listened so far: O(resident) then. `leave` must follow."""
        self.listeners += 1
        if self.listeners > 1:
            return
        self._first = self.next
        self._ring = [None] * self._capacity
        for model, pool in self._pools.items():
            places = [Place(model, component.name) for component in pool.layout.components]
            pages = [index.resident_pages() for index in pool.index]
            self._recorders[model] = [_Recorder(self, *of) for of in zip(places, pages, strict=True)]
            self._before[model] = pool.tell(self._recorders[model])
            for recorder, inner in zip(self._recorders[model], self._before[model], strict=True):
                recorder.pass_on_to(inner)

    def leave(self) -> None:
        """Undo one `listen`; the last one to leave ends the recording."""
        self.listeners -= 1
        if self.listeners:
            return
        for model, pool in self._pools.items():
            pool.tell(self._before.pop(model))
        self._recorders.clear()
        self._ring = []
        self.next += 1
        self._first = (
            self.next
        )  # what happens from now on has no number, so whoever comes back with one has missed something

    def read(self, since: int, limit: int) -> list[ResidencyEvent] | None:
        """Return up to `limit` events from number `since` on; None if some of them are lost, or none has this number.

        Somebody must be listening.
        """
        if not self.oldest <= since <= self.next:
            return None
        ring, capacity = self._ring, self._capacity
        numbers = range(since, min(since + limit, self.next))
        return [event for event in (ring[number % capacity] for number in numbers) if event is not None]

    def resident(self) -> Iterator[tuple[Place, list[bytes]]]:
        """Yield what is resident now, by place. Somebody must be listening; each list is O(resident)."""
        for recorders in self._recorders.values():
            for recorder in recorders:
                yield recorder.place, list(recorder.pages.values())

    def record(self, event: ResidencyEvent) -> None:
        """Give an event the next number; the oldest one may be lost by that."""
        self._ring[self.next % self._capacity] = event
        self.next += 1

    def check_integrity(self) -> None:
        """Compare with the indexes what is said to be resident; raise if it differs. O(resident)."""
        if bool(self.listeners) != bool(self._recorders) or len(self._ring) not in {0, self._capacity}:
            raise RuntimeError(f"{self.listeners} listeners, {len(self._recorders)} models recorded")
        for model, recorders in self._recorders.items():
            for recorder, index in zip(recorders, self._pools[model].index, strict=True):
                if recorder.pages != index.resident_pages():
                    raise RuntimeError(f"{len(recorder.pages)} pages recorded as resident, the index has {len(index)}")
        if any(self._ring[number % self._capacity] is None for number in range(self.oldest, self.next)):
            raise RuntimeError(f"events {self.oldest} to {self.next} are not all there")


class _Recorder:
    """Stands before the SlotEvents of one component. `pages` are the resident ones by slot."""

    def __init__(self, log: Residency, place: Place, pages: dict[int, bytes]) -> None:
        self.place = place
        self.pages = pages
        self._log = log

    def pass_on_to(self, inner: SlotEvents) -> None:
        self._inner = inner

    def begin_fill(self, slot: int, lent: bool = False) -> None:
        self._inner.begin_fill(slot, lent)

    def publish(self, slot: int, key: bytes, page: int = 0, dirty: bool = False) -> None:
        self._inner.publish(slot, key, page, dirty)
        self.pages[slot] = key
        self._log.record(ResidencyEvent(True, self.place, key))

    def set_clean(self, slot: int) -> None:
        self._inner.set_clean(slot)

    def clear(self, slot: int) -> None:
        self._inner.clear(slot)
        key = self.pages.pop(slot, None)
        if key is not None:
            self._log.record(ResidencyEvent(False, self.place, key))
