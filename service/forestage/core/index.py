"""The resident pages of one component: key to slot, who holds them, which one goes first.

Law: `find(key)` and `key_of(slot)` are inverse; a slot is evictable exactly if it is resident and nobody holds it.

Order of eviction: least recently used chain first, and within a chain the deepest page first. Holding takes a page out
of the order; releasing puts it at its young end. A prefix is released from its deepest page to its first, so an
ancestor is always younger than its descendants and no eviction leaves a page that nothing leads to.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["PageIndex"]


class PageIndex:
    """Resident pages with hold counts. Single operations are O(1), whatever is resident or held."""

    def __init__(self, capacity: int) -> None:
        self._slot_of: dict[bytes, int] = {}
        self._key_of: list[bytes | None] = [None] * capacity
        self._holds = [0] * capacity
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._fresh = bytearray(capacity)  # read from L3 and not used since
        self.evicted = 0
        self.used = 0
        self.unused = 0

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def evictable(self) -> int:
        """Resident pages that nobody holds."""
        return len(self._evictable)

    @property
    def held(self) -> int:
        """Resident pages that a job or a lease holds."""
        return len(self._slot_of) - self.evictable

    def find(self, key: bytes) -> int:
        """Return the slot of a resident page, -1 if it is not resident."""
        return self._slot_of.get(key, -1)

    def key_of(self, slot: int) -> bytes | None:
        return self._key_of[slot]

    def resident_pages(self) -> dict[int, bytes]:
        """Return the keys of all resident pages by slot. O(resident)."""
        return {slot: key for key, slot in self._slot_of.items()}

    def is_held(self, slot: int) -> bool:
        return self._holds[slot] > 0

    def count_held(self, slots: range) -> int:
        """Count those of some slots that somebody holds."""
        holds = self._holds[slots.start : slots.stop : slots.step]
        return len(holds) - holds.count(0)

    def held_once(self, slot: int) -> bool:
        """Say whether exactly one holder keeps this slot."""
        return self._holds[slot] == 1

    def look_up(self, keys: Iterable[bytes]) -> list[int | None]:
        """Return the slot of each page, None where it is not resident."""
        return list(map(self._slot_of.get, keys))

    def slots_of(self, keys: Iterable[bytes]) -> list[int]:
        """Return the slots of resident pages. Raises KeyError when one is not resident."""
        return list(map(self._slot_of.__getitem__, keys))

    def mark_resident(self, slots: Sequence[int | None], first: int, status: bytearray, idle: int, held: int) -> None:
        """Write `idle` or `held` into `status` for each page from `first` on that has a slot."""
        holds, here = self._holds, slots[first:]
        run = here.index(None) if None in here else len(here)
        is_held = bytes(map(bool, map(holds.__getitem__, here[:run])))  # type: ignore[arg-type]  # before the first None
        status[first : first + run] = is_held.translate(bytes([idle, held]).ljust(256))
        for page, slot in enumerate(here[run:], first + run):
            if slot is not None:
                status[page] = held if holds[slot] else idle

    def insert(self, slot: int, key: bytes, holds: int, *, fresh: bool = True) -> None:
        """Make a page resident, held `holds` times; `fresh` says that it was just read from L3."""
        if key in self._slot_of or self._key_of[slot] is not None:
            raise RuntimeError(f"slot {slot} or its key is resident already")
        self._slot_of[key] = slot
        self._key_of[slot] = key
        self._holds[slot] = holds
        self._fresh[slot] = fresh
        if not holds:
            self._order_of(slot)[slot] = None

    def hold(self, slots: Iterable[int], tenant: int = 0) -> None:
        """Keep resident pages from eviction until they are released as often as held."""
        holds, evictable = self._holds, self._evictable
        for slot in slots:
            if not holds[slot]:
                del evictable[slot]
            holds[slot] += 1

    def release(self, slots: Iterable[int]) -> None:
        """Undo one hold each. Pass deeper pages first: the last one released is the last to be evicted."""
        holds, evictable = self._holds, self._evictable
        for slot in slots:
            count = holds[slot]
            if count <= 0:
                raise RuntimeError(f"slot {slot} released without a hold")
            holds[slot] = count - 1
            if count == 1:
                evictable[slot] = None

    def mark_used(self, slots: Iterable[int]) -> None:
        """Count pages that a prefetch brought and somebody wanted again or consumed, once each."""
        fresh = self._fresh
        for slot in slots:
            if fresh[slot]:
                fresh[slot] = 0
                self.used += 1

    def demote(self, slots: Iterable[int]) -> None:
        """Let resident pages that nobody holds go first from now on. Pass deeper pages last: they go before others."""
        for slot in slots:
            self._evictable.move_to_end(slot, last=False)

    def evict(self, count: int) -> list[int]:
        """Drop the pages that go first and return their slots; there must be as many that can go."""
        popitem, slot_of, key_of, fresh = self._evictable.popitem, self._slot_of, self._key_of, self._fresh
        evicted = []
        for _ in range(count):
            slot, _ = popitem(last=False)
            del slot_of[key_of[slot]]  # type: ignore[arg-type]  # a resident slot has a key
            key_of[slot] = None
            self.unused += fresh[slot]
            fresh[slot] = 0
            evicted.append(slot)
        self.evicted += count
        return evicted

    def drop(self, slot: int) -> None:
        """Drop a resident page that nobody holds."""
        del self._order_of(slot)[slot]
        self._forget(slot)

    def _order_of(self, slot: int) -> OrderedDict[int, None]:
        """Return the order of eviction in which a resident page stands while nobody holds it."""
        return self._evictable

    def _forget(self, slot: int) -> None:
        key = self._key_of[slot]
        assert key is not None
        del self._slot_of[key]
        self._key_of[slot] = None
        self.unused += self._fresh[slot]
        self._fresh[slot] = 0

    def check_holds(self, expected: Mapping[int, int]) -> None:
        """Compare hold counts with those of the known holders, by slot; raise if they differ."""
        counted = {slot: count for slot, count in enumerate(self._holds) if count}
        if counted != dict(expected):
            raise RuntimeError(f"holds by slot {counted}, holders say {dict(expected)}")

    def check_integrity(self) -> None:
        """Compare all tables with each other; raise with the numbers if the law is broken. O(capacity)."""
        for key, slot in self._slot_of.items():
            if self._key_of[slot] != key:
                raise RuntimeError(f"slot {slot} does not name the key that names it")
        named = sum(key is not None for key in self._key_of)
        if named != len(self._slot_of):
            raise RuntimeError(f"{named} slots name a key, {len(self._slot_of)} keys name a slot")
        num_idle = 0
        for slot, named_key in enumerate(self._key_of):
            idle = named_key is not None and self._holds[slot] == 0
            if named_key is not None and idle != (slot in self._order_of(slot)):
                raise RuntimeError(f"slot {slot}: holds {self._holds[slot]}, evictable {not idle}")
            num_idle += idle
            if named_key is None and (self._holds[slot] or self._fresh[slot]):
                raise RuntimeError(f"slot {slot} is held or fresh without a page")
        if num_idle != self.evictable:
            raise RuntimeError(f"{self.evictable} evictable slots, recounted {num_idle}")
