"""Accounting of the slots of one component.

Law: free + reserved + filling + resident == capacity, and the free list names exactly the free slots.
Every transition is checked: a slot that is not in the state its mover believes is a defect, not a condition.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import Protocol

__all__ = ["SlotEvents", "SlotState", "Slots"]


class SlotState(IntEnum):
    FREE = 0
    RESERVED = 1  # promised to a read that has not begun
    FILLING = 2  # a storage, or an engine that it was lent to, may write to it
    RESIDENT = 3  # whole and verified


class SlotEvents(Protocol):
    """Who mirrors the slots for readers in other processes; called before the state here changes."""

    def begin_fill(self, slot: int, lent: bool = False) -> None:
        """The content of `slot` may change from now on; `lent`: by the hand of another process."""

    def publish(self, slot: int, key: bytes, page: int = 0, dirty: bool = False) -> None:
        """`slot` holds the whole page `key` from now on, number `page` of its prefix; `dirty`: L3 has it not yet."""

    def set_clean(self, slot: int) -> None:
        """L3 has the page of a resident `slot` now."""

    def clear(self, slot: int) -> None:
        """`slot` holds no page any more."""


class Slots:
    """Which slot is in which state. All operations are O(1) a slot."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._state = bytearray(capacity)
        self._free = list(range(capacity - 1, -1, -1))
        self._count = [capacity, 0, 0, 0]

    @property
    def free(self) -> int:
        return self._count[SlotState.FREE]

    @property
    def reserved(self) -> int:
        return self._count[SlotState.RESERVED]

    @property
    def filling(self) -> int:
        return self._count[SlotState.FILLING]

    @property
    def resident(self) -> int:
        return self._count[SlotState.RESIDENT]

    def state(self, slot: int) -> SlotState:
        return SlotState(self._state[slot])

    def take(self, count: int) -> list[int]:
        """Reserve free slots; there must be as many."""
        if count > len(self._free):
            raise RuntimeError(f"{count} slots wanted, {len(self._free)} are free")
        first = len(self._free) - count
        taken = self._free[first:]
        taken.reverse()
        del self._free[first:]
        state = self._state
        for slot in taken:
            if state[slot]:
                raise RuntimeError(f"slot {slot} is {self.state(slot).name}, and on the free list")
            state[slot] = 1
        self._count[0] -= count
        self._count[1] += count
        return taken

    def count_states(self, slots: range) -> list[int]:
        """Count some slots by state, as SlotState numbers them."""
        states = self._state[slots.start : slots.stop : slots.step]
        return [states.count(state) for state in range(4)]

    def begin(self, slot: int) -> None:
        """Reserved to filling: from now on somebody may write to the slot."""
        self._move(slot, 1, 2)

    def begin_all(self, slots: Iterable[int]) -> None:
        """Reserved to filling, many slots."""
        self._move_all(slots, 1, 2)

    def unbegin(self, slot: int) -> None:
        """Filling back to reserved: the read ended before it touched the slot, and is still wanted."""
        self._move(slot, 2, 1)

    def publish(self, slot: int) -> None:
        """Filling to resident."""
        self._move(slot, 2, 3)

    def publish_all(self, slots: Iterable[int]) -> None:
        """Filling to resident, many slots."""
        self._move_all(slots, 2, 3)

    def give_back(self, *slots: int) -> None:
        """Reserved, filling (its read has ended) or resident to free."""
        states, count = self._state, self._count
        for slot in slots:
            state = states[slot]
            if state == 0:
                raise RuntimeError(f"slot {slot} given back twice")
            states[slot] = 0
            count[state] -= 1
            count[0] += 1
        self._free += slots

    def adopt(self, slots: Iterable[int]) -> None:
        """Free to resident: pages that were there before the service started. O(capacity), however many they are."""
        self._take_out(slots, SlotState.RESIDENT)

    def lend(self, slots: Iterable[int]) -> None:
        """Free to filling: somebody may have been writing to them before the service started. O(capacity)."""
        self._take_out(slots, SlotState.FILLING)

    def _take_out(self, slots: Iterable[int], state: SlotState) -> None:
        self._move_all(slots, 0, state)
        self._free = [slot for slot in self._free if not self._state[slot]]

    def _move(self, slot: int, before: int, after: int) -> None:
        if self._state[slot] != before:
            raise RuntimeError(f"slot {slot} is {self.state(slot).name}, not {SlotState(before).name}")
        self._state[slot] = after
        self._count[before] -= 1
        self._count[after] += 1

    def _move_all(self, slots: Iterable[int], before: int, after: int) -> None:
        states, moved = self._state, 0
        for slot in slots:
            if states[slot] != before:
                raise RuntimeError(f"slot {slot} is {self.state(slot).name}, not {SlotState(before).name}")
            states[slot] = after
            moved += 1
        self._count[before] -= moved
        self._count[after] += moved

    def check_integrity(self) -> None:
        """Recount everything; raise with the numbers if the law is broken. O(capacity)."""
        counted = [self._state.count(state) for state in range(4)]
        if counted != self._count or sum(counted) != self.capacity:
            raise RuntimeError(f"slot counts {self._count}, recounted {counted}, capacity {self.capacity}")
        if len(self._free) != self.free or any(self._state[slot] for slot in self._free):
            raise RuntimeError(f"free list of {len(self._free)} does not name the {self.free} free slots")
        if len(set(self._free)) != len(self._free):
            raise RuntimeError("free list names a slot twice")
