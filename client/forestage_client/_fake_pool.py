"""The pool and the storage of one model as the fake service keeps them: keys and slots, no bytes.

Law, per component: free + resident + reserved == slots; `idle` are exactly the resident pages that nobody holds, in
the order in which they are evicted.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from forestage_client._types import Component, Model

__all__ = ["FakePool", "Grant", "Hold", "Plan", "Shelf"]


@dataclass(slots=True, eq=False)
class Shelf:
    """One component: what L3 has of it, and what its slots hold."""

    component: Component
    slots: int
    free: list[int]
    stored: set[bytes] = field(default_factory=set)
    resident: dict[bytes, int] = field(default_factory=dict)
    idle: dict[bytes, None] = field(default_factory=dict)
    holds: Counter[bytes] = field(default_factory=Counter)

    def needs(self, device_pages: int, length: int) -> range:
        """Return the pages that a prefix of `length` needs of this component."""
        first = length - self.component.window if self.component.is_tail else 0
        return range(max(device_pages, first), max(device_pages, length))

    def is_resident(self, key: bytes) -> bool:
        return key in self.resident

    def is_anywhere(self, key: bytes) -> bool:
        return key in self.resident or key in self.stored

    def take(self) -> int:
        """Take a free slot, or that of the page that has been idle for longest."""
        if self.free:
            return self.free.pop()
        oldest = next(iter(self.idle))
        del self.idle[oldest]
        return self.resident.pop(oldest)


Hold = tuple[Shelf, bytes]
Present = Callable[[Shelf, bytes], bool]


@dataclass(frozen=True, slots=True)
class Plan:
    """Lengths in pages; `usable` is the largest boundary that needs no read."""

    host: int
    stored: int
    restorable: int
    granted: int
    usable: int


@dataclass(slots=True, eq=False)
class Grant:
    """What a job has: resident pages held for it, and slots reserved for the pages it reads.

    `usable` is the largest boundary that is resident and held: taking slots may have cost the plan's its tail states.
    """

    keys: Sequence[bytes]
    device_pages: int
    plan: Plan
    reads: bool
    usable: int
    held: list[Hold]
    reserved: list[tuple[Shelf, bytes, int]]

    def num_loaded(self, ready: int) -> int:
        """Count the pages below `ready` that this job read, a page of several components once."""
        read = {key for shelf, key, _ in self.reserved if not shelf.component.is_tail}
        return sum(key in read for key in self.keys[:ready])


class FakePool:
    """Grants, loads and evicts like the service, but in no time and one job after the other."""

    def __init__(self, model: Model, pool_pages: int) -> None:
        """Give each component its `slots`, or `pool_pages` where it names none."""
        self.model = model
        self.shelves: list[Shelf] = []
        for component in model.components:
            slots = pool_pages if component.slots is None else component.slots
            self.shelves.append(Shelf(component, slots, list(reversed(range(slots)))))
        self._tails = [shelf for shelf in self.shelves if shelf.component.is_tail]
        self._every_page = [shelf for shelf in self.shelves if not shelf.component.is_tail]

    def store(self, keys: Sequence[bytes], tail_states: Mapping[str, Sequence[int]]) -> None:
        """Put pages into L3, and the tail components' windows that end at the given prefix lengths."""
        for shelf in self._every_page:
            shelf.stored.update(keys)
        for name, lengths in tail_states.items():
            tails = [shelf for shelf in self._tails if shelf.component.name == name]
            if not tails or not all(0 < length <= len(keys) for length in lengths):
                raise ValueError(f"no tail component {name!r}, or a prefix length outside 1..{len(keys)}")
            tails[0].stored.update(keys[page] for length in lengths for page in tails[0].needs(0, length))

    def forget(self, keys: Sequence[bytes], component: str | None) -> None:
        """Take pages out of L3, of one component or of all; what is resident stays."""
        for shelf in self.shelves:
            if component in (None, shelf.component.name):
                shelf.stored.difference_update(keys)

    def measure(self, keys: Sequence[bytes], device_pages: int, *, storage: bool = True) -> Plan:
        """Say how far a prefix goes, and how much of it there is room for."""
        present = Shelf.is_anywhere if storage else Shelf.is_resident
        host = self._reach(keys, device_pages, Shelf.is_resident)
        stored = self._reach(keys, device_pages, present)
        restorable = granted = self._boundary(keys, device_pages, stored, present)
        while granted > device_pages and not self._fits(keys, device_pages, granted, host):
            granted = self._boundary(keys, device_pages, granted - 1, present)
        usable = self._boundary(keys, device_pages, min(host, granted), Shelf.is_resident)
        return Plan(host, stored, restorable, granted, usable)

    def boundaries(self, keys: Sequence[bytes], device_pages: int, limit: int) -> list[int]:
        """Say at which lengths up to `limit` a stored prefix can be resumed."""
        lengths = range(device_pages + 1, limit + 1)
        return [n for n in lengths if self._boundary(keys, device_pages, n, Shelf.is_anywhere) == n]

    def grant(self, keys: Sequence[bytes], device_pages: int, min_pages: int) -> Grant:
        """Hold what is resident and reserve slots for the rest, unless the gain is not worth it."""
        plan = self.measure(keys, device_pages)
        reads = plan.granted - plan.usable >= max(1, min_pages)
        goal = plan.granted if reads else plan.usable
        wanted = [(shelf, keys[page]) for shelf in self.shelves for page in shelf.needs(device_pages, goal)]
        beyond = [(shelf, keys[page]) for shelf in self._every_page for page in range(goal, plan.host)]
        held = self.hold([*(hold for hold in wanted if hold[0].is_resident(hold[1])), *beyond])
        missing = [hold for hold in wanted if not hold[0].is_resident(hold[1])]
        reserved = [(shelf, key, shelf.take()) for shelf, key in missing]
        usable = self._boundary(keys, device_pages, plan.usable, Shelf.is_resident)
        held += self.hold([(shelf, keys[page]) for shelf in self._tails for page in shelf.needs(device_pages, usable)])
        return Grant(keys, device_pages, plan, reads, usable, held, reserved)

    def settle(self, grant: Grant, *, whole: bool) -> tuple[int, list[Hold]]:
        """End a grant; return the length that is ready and the holds on its pages.

        `whole`: the reserved pages have all arrived; else none has.
        """
        for shelf, key, slot in grant.reserved:
            if whole and not shelf.is_resident(key):
                shelf.resident[key] = slot
                shelf.idle[key] = None
            else:
                shelf.free.append(slot)
        limit = grant.plan.granted if whole else grant.usable
        ready = self._boundary(grant.keys, grant.device_pages, limit, Shelf.is_resident)
        holds = self.lease(grant.keys, grant.device_pages, ready)
        self.let_go(grant.held)
        return ready, holds

    def lease(self, keys: Sequence[bytes], device_pages: int, length: int) -> list[Hold]:
        """Hold the resident pages of a prefix."""
        return self.hold([(shelf, keys[page]) for shelf in self.shelves for page in shelf.needs(device_pages, length)])

    def hold(self, holds: list[Hold]) -> list[Hold]:
        for shelf, key in holds:
            shelf.idle.pop(key, None)
            shelf.holds[key] += 1
        return holds

    def let_go(self, holds: list[Hold]) -> None:
        """Give holds back, the deepest page first, so that it is evicted first. The list is empty afterwards."""
        while holds:
            shelf, key = holds.pop()
            shelf.holds[key] -= 1
            if not shelf.holds[key]:
                del shelf.holds[key]
                shelf.idle[key] = None

    def demote(self, keys: Sequence[bytes], device_pages: int) -> tuple[int, int]:
        """Let the resident pages that nobody holds go first, the deepest before all; return counts: those, and held."""
        held = {key for shelf in self.shelves for key in keys[device_pages:] if key in shelf.holds}
        demoted = set()
        for shelf in self.shelves:
            first = [key for key in reversed(keys[device_pages:]) if key in shelf.idle]
            shelf.idle = dict.fromkeys(first) | shelf.idle
            demoted.update(first)
        return len(demoted - held), len(held)

    def _reach(self, keys: Sequence[bytes], device_pages: int, present: Present) -> int:
        length = device_pages
        while length < len(keys) and all(present(shelf, keys[length]) for shelf in self._every_page):
            length += 1
        return length

    def _boundary(self, keys: Sequence[bytes], device_pages: int, limit: int, present: Present) -> int:
        for length in range(limit, device_pages, -1):
            windows = ((shelf, keys[page]) for shelf in self._tails for page in shelf.needs(device_pages, length))
            if all(present(shelf, key) for shelf, key in windows):
                return length
        return device_pages

    def _fits(self, keys: Sequence[bytes], device_pages: int, length: int, host: int) -> bool:
        for shelf in self.shelves:
            wanted = {keys[page] for page in shelf.needs(device_pages, length)}
            kept = wanted if shelf.component.is_tail else wanted.union(keys[device_pages:host])
            room = len(shelf.free) + sum(key not in kept for key in shelf.idle)
            if sum(not shelf.is_resident(key) for key in wanted) > room:
                return False
        return True
