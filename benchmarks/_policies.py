"""Policies of eviction for whole prefixes, without time or I/O: those of the literature, Belady's, the service's own.

Each serves one request after another: what is missing is brought, whatever has to go for it.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Sequence

from forestage.core.index import PageIndex
from forestage.core.wants import Want, Wants

__all__ = ["POLICIES", "Policy", "hits_of"]

Keys = tuple[bytes, ...]


class Policy:
    """A pool of `capacity` pages; `resident` are its pages. Policies that know the future are told it at the start."""

    resident: Container[bytes]

    def __init__(self, capacity: int, future: Sequence[Keys]) -> None:
        self.capacity = capacity
        self.future = future

    def serve(self, number: int, keys: Keys) -> None:
        """Serve request `number`."""
        raise NotImplementedError


def hits_of(policy: Policy, requests: Sequence[Keys]) -> int:
    """Count the leading pages of each request that are resident when it comes."""
    hits = 0
    for number, keys in enumerate(requests):
        for key in keys:
            if key not in policy.resident:
                break
            hits += 1
        policy.serve(number, keys)
    return hits


class Lru(Policy):
    """Page by page in the order in which they are asked for: the first page of a prefix goes first."""

    def __init__(self, capacity: int, future: Sequence[Keys]) -> None:
        super().__init__(capacity, future)
        self.pages: OrderedDict[bytes, None] = OrderedDict()
        self.resident = self.pages

    def serve(self, number: int, keys: Keys) -> None:
        pages = self.pages
        for key in keys:
            if key in pages:
                pages.move_to_end(key)
                continue
            if len(pages) >= self.capacity:
                del pages[self._victim()]
            pages[key] = None

    def _victim(self) -> bytes:
        return next(iter(self.pages))


class NaiveHints(Lru):
    """LRU that takes no page which one of the next `AHEAD` requests names, as long as there is another."""

    AHEAD = 100

    def __init__(self, capacity: int, future: Sequence[Keys]) -> None:
        super().__init__(capacity, future)
        self.wanted: dict[bytes, int] = {}
        self.idle: OrderedDict[bytes, None] = OrderedDict()  # in the order of `pages`, without what is wanted
        for keys in future[: self.AHEAD]:
            self._want(keys)

    def _want(self, keys: Keys) -> None:
        for key in keys:
            self.wanted[key] = self.wanted.get(key, 0) + 1
            self.idle.pop(key, None)

    def serve(self, number: int, keys: Keys) -> None:
        if number + self.AHEAD < len(self.future):
            self._want(self.future[number + self.AHEAD])
        for key in keys:
            self.idle.pop(key, None)
        super().serve(number, keys)
        for key in keys:
            self.wanted[key] -= 1
            if not self.wanted[key]:
                del self.wanted[key]
                if key in self.pages:
                    self.idle[key] = None

    def _victim(self) -> bytes:
        return self.idle.popitem(last=False)[0] if self.idle else next(iter(self.pages))


class Slru(Policy):
    """Segmented LRU: four fifths on probation, one fifth for what was hit there."""

    def __init__(self, capacity: int, future: Sequence[Keys]) -> None:
        super().__init__(capacity, future)
        self.probation: OrderedDict[bytes, None] = OrderedDict()
        self.protected: OrderedDict[bytes, None] = OrderedDict()
        self.resident = set[bytes]()
        self.pages = self.resident

    def serve(self, number: int, keys: Keys) -> None:
        for key in keys:
            if key in self.protected:
                self.protected.move_to_end(key)
            elif key in self.probation:
                del self.probation[key]
                self.protected[key] = None
                if len(self.protected) > self.capacity // 5:
                    self.probation[self.protected.popitem(last=False)[0]] = None
            else:
                if len(self.pages) >= self.capacity:
                    self.pages.remove((self.probation or self.protected).popitem(last=False)[0])
                self.probation[key] = None
                self.pages.add(key)


class S3Fifo(Policy):
    """Three FIFO queues: a tenth for new pages, the rest for those hit there, and the names of such as left."""

    def __init__(self, capacity: int, future: Sequence[Keys]) -> None:
        super().__init__(capacity, future)
        self.small: OrderedDict[bytes, None] = OrderedDict()
        self.main: OrderedDict[bytes, None] = OrderedDict()
        self.ghosts: OrderedDict[bytes, None] = OrderedDict()
        self.hits: dict[bytes, int] = {}
        self.resident = self.hits
        self.small_pages = max(1, capacity // 10)

    def serve(self, number: int, keys: Keys) -> None:
        for key in keys:
            if key in self.hits:
                self.hits[key] = min(3, self.hits[key] + 1)
                continue
            while len(self.hits) >= self.capacity:
                self._evict()
            self.hits[key] = 0
            known = self.ghosts.pop(key, self) is None
            (self.main if known else self.small)[key] = None

    def _evict(self) -> None:
        main_pages = self.capacity - self.small_pages
        while self.small and (len(self.small) >= self.small_pages or not self.main):
            key = self.small.popitem(last=False)[0]
            if not self.hits[key]:
                del self.hits[key]
                self.ghosts[key] = None
                if len(self.ghosts) > main_pages:
                    self.ghosts.popitem(last=False)
                return
            self.hits[key] = 0
            self.main[key] = None
            if len(self.main) > main_pages:
                break
        while self.main:
            key = self.main.popitem(last=False)[0]
            if not self.hits[key]:
                del self.hits[key]
                return
            self.hits[key] -= 1
            self.main[key] = None


class AgedLfu(Policy):
    """Least frequently used, the oldest of equals; counts outlive the page, halved every eight pools of pages."""

    def __init__(self, capacity: int, future: Sequence[Keys]) -> None:
        super().__init__(capacity, future)
        self.counts: dict[bytes, int] = {}
        self.pages: dict[bytes, int] = {}
        self.resident = self.pages
        self.lines: dict[int, OrderedDict[bytes, None]] = {}
        self.asked = 0

    def serve(self, number: int, keys: Keys) -> None:
        for key in keys:
            count = self.counts[key] = self.counts.get(key, 0) + 1
            if key in self.pages:
                self._leave(key)
            elif len(self.pages) >= self.capacity:
                victim = next(iter(self.lines[min(self.lines)]))
                self._leave(victim)
                del self.pages[victim]
            self._join(key, count)
            self.asked += 1
            if self.asked % (8 * self.capacity) == 0:
                self._age()

    def _leave(self, key: bytes) -> None:
        line = self.lines[self.pages[key]]
        del line[key]
        if not line:
            del self.lines[self.pages[key]]

    def _join(self, key: bytes, count: int) -> None:
        self.pages[key] = count
        self.lines.setdefault(count, OrderedDict())[key] = None

    def _age(self) -> None:
        self.counts = {key: count // 2 for key, count in self.counts.items() if count > 1 or key in self.pages}
        order = [key for count in sorted(self.lines) for key in self.lines[count]]
        self.lines.clear()
        for key in order:
            self._join(key, self.counts[key])


class Belady(Policy):
    """The page goes that is wanted again last; of one prefix, the deepest."""

    def __init__(self, capacity: int, future: Sequence[Keys]) -> None:
        super().__init__(capacity, future)
        self.pages: dict[bytes, int] = {}
        self.resident = self.pages
        self.heap: list[tuple[int, int, bytes]] = []
        upcoming: dict[bytes, int] = {}
        self.next_use: list[list[int]] = []
        for number in range(len(future) - 1, -1, -1):
            self.next_use.append([upcoming.get(key, len(future)) for key in future[number]])
            upcoming.update(dict.fromkeys(future[number], number))
        self.next_use.reverse()

    def serve(self, number: int, keys: Keys) -> None:
        pages, asked = self.pages, set(keys)
        excess = len(pages) + sum(key not in pages for key in keys) - self.capacity
        while excess > 0 and self.heap:
            when, _, key = heapq.heappop(self.heap)
            if pages.get(key) == -when and key not in asked:
                del pages[key]
                excess -= 1
        for page, (key, when) in enumerate(zip(keys, self.next_use[number], strict=True)):
            pages[key] = when
            heapq.heappush(self.heap, (-when, -page, key))


class _Resident(Container[bytes]):
    """The keys of an index."""

    def __init__(self, index: PageIndex) -> None:
        self._find = index.find

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self._find(key) >= 0


class Core(Policy):
    """What the service does: core.index, as a job uses it that holds its prefix and releases it at once."""

    def __init__(self, capacity: int, future: Sequence[Keys]) -> None:
        super().__init__(capacity, future)
        self.index = PageIndex(capacity)
        self.wants = Wants([self.index], max(1, int(capacity * 0.8)))
        self.free = list(range(capacity))
        self.resident = _Resident(self.index)

    def serve(self, number: int, keys: Keys) -> None:
        index, keys = self.index, keys[: self.capacity]
        slots = [index.find(key) for key in keys]
        index.hold([slot for slot in slots if slot >= 0], again=True)
        missing = sum(slot < 0 for slot in slots) - len(self.free)
        self.free += index.evict(max(0, missing))
        for page, key in enumerate(keys):
            if slots[page] < 0:
                slots[page] = self.free.pop()
                index.insert(slots[page], key, 1)
                self.wants.arrived(key)
        index.release(slots[::-1])


class _Hinted(Core):
    """The same, told of each prefix `AHEAD` requests before it comes."""

    AHEAD = 100

    def __init__(self, capacity: int, future: Sequence[Keys]) -> None:
        super().__init__(capacity, future)
        self.expected: deque[Want] = deque(self.wants.add(keys) for keys in future[: self.AHEAD])

    def serve(self, number: int, keys: Keys) -> None:
        if number + self.AHEAD < len(self.future):
            self.expected.append(self.wants.add(self.future[number + self.AHEAD]))
        met = self.expected.popleft()
        super().serve(number, keys)
        self.wants.remove(met)


def _hinted(base: type[Policy], ahead: int) -> Callable[[int, Sequence[Keys]], Policy]:
    """Return a policy that knows so many requests ahead."""
    return type(base.__name__, (base,), {"AHEAD": ahead})


POLICIES: dict[str, Callable[[int, Sequence[Keys]], Policy]] = {
    "Belady": Belady,
    "LRU": Lru,
    "S3-FIFO": S3Fifo,
    "SLRU 80 %": Slru,
    "aged LFU": AgedLfu,
    "forestage": Core,
    **{f"LRU, naive hints {ahead} ahead": _hinted(NaiveHints, ahead) for ahead in (30, 100, 300)},
    **{f"forestage, hints {ahead} ahead": _hinted(_Hinted, ahead) for ahead in (30, 100, 300)},
}
