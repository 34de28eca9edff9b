"""Watches writes between events: what was committed stays to be seen, and marked, until L3 has it or it is given up."""

from collections.abc import Sequence

from forestage.core.write import PageWrite, Write, WriteState
from support.engine_driver import EngineDriver

__all__ = ["Place", "Writing"]

Place = tuple[int, int, bytes, int]  # component, page, key, slot


class Writing:
    """The writes of one life of an engine. `open` are those that may still be committed, in time or too late."""

    def __init__(self, driver: EngineDriver) -> None:
        self.driver = driver
        self.open: list[Write] = []
        self.in_flight: list[PageWrite] = []
        self._committed: list[Write] = []
        self._dirty: dict[tuple[int, bytes], int] = {}

    def expect_commit(self, write: Write) -> tuple[list[Place], set[int]]:
        """Say which places a commit would publish now, and which pages are duplicates in every component."""
        places = [
            (c, page, write.keys[page], slot) for c, slots in enumerate(write.slots) for page, slot in slots.items()
        ]
        new = [place for place in places if place[2] not in self.driver.resident(place[0])]
        published = {page for _, page, _, _ in new}
        return new, {page for _, page, _, _ in places} - published

    def committed(self, write: Write, new: Sequence[Place]) -> None:
        self._committed.append(write)
        self._dirty.update({(c, key): slot for c, _, key, slot in new})

    def lent_to(self, write: Write) -> bool:
        return any(write.slots) or write in list(self.driver.engine.writes)

    def dirty(self) -> dict[tuple[int, bytes], int]:
        return dict(self._dirty)

    def adopted(self, dirty: dict[tuple[int, bytes], int]) -> None:
        """Another life goes on with what this one left dirty."""
        self._dirty = dirty
        assert self.driver.engine.writes.backlog == len(dirty)

    def hand_out(self) -> None:
        one = self.driver.engine.writes.next_page()
        if one is not None:
            self.in_flight.append(one)

    def end(self, index: int, *, well: bool) -> None:
        """Let L3 take a page, or not."""
        one = self.in_flight.pop(index % len(self.in_flight))
        writes, now = self.driver.engine.writes, self.driver.now
        attempts = one.attempts
        if well:
            self.driver.stored.add((one.component, one.key))
            writes.stored(one, now)
        else:
            writes.not_stored(one, now)
        if well or attempts + 1 == self.driver.settings.writes.max_attempts:
            del self._dirty[one.component, one.key]

    def drain(self) -> None:
        """Let L3 take everything that is due."""
        while self.in_flight or self.driver.engine.writes.backlog:
            self.hand_out()
            self.end(0, well=True)

    def check(self) -> None:
        """Dirty pages are where they were committed, held and marked; the counts of every write add up."""
        marked: list[set[int]] = [set() for _ in self.driver.logs]
        for (c, key), slot in self._dirty.items():
            assert self.driver.logs[c].visible[slot] == key
            assert self.driver.pool.index[c].is_held(slot)
            marked[c].add(slot)
        assert [log.dirty for log in self.driver.logs] == marked
        for write in self._committed:
            assert write.state is WriteState.COMMITTED
            assert write.durable + write.failed + len(write.waiting) == write.committed
