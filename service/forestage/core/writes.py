"""Pages that engines put into the pool, and their way to L3 behind it.

Law: the slots of open writes, and of expired ones until their margin is over, are exactly those that the pools have
lent; a dirty page is in the queue, waits for its next attempt, or is with the storage, and its write holds it. Pages
asked == pages by result + pages of open writes + pages of committed ones that are waiting.

A write releases its pages only when all of them are settled, deepest page first, so that in the order of eviction an
ancestor stays behind its descendants although L3 gets it before them.
"""

import uuid
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

from forestage.core.errors import CapacityError, GoneError, NotFoundError
from forestage.core.job import Job
from forestage.core.layout import ModelLayout
from forestage.core.loads import Load
from forestage.core.model_pool import ModelPool
from forestage.core.timers import Timers
from forestage.core.write import PageWrite, Write, WriteReason, WriteResult, WriteSettings, WriteState
from forestage.core.write_parts import Share, SharedWrites

__all__ = ["Writes"]

Masks = Sequence[bytes | bytearray]
Arrival = Callable[[Load, Sequence[Job], int], None]


class Writes:
    """Writes by id, and the queue of dirty pages to L3. `settled` are writes to announce, once each.

    The id of a part of a write is that of the write, a dot and the part's number.
    """

    def __init__(
        self, pools: Mapping[str, ModelPool], settings: WriteSettings, timers: Timers[Callable[[float], None]]
    ) -> None:
        self._pools = pools
        self.settings = settings
        self._timers = timers
        self._by_id: dict[str, Write] = {}
        self._owning: dict[Write, None] = {}
        self._shared = SharedWrites()
        self._queue: deque[PageWrite] = deque()
        self._retries: dict[PageWrite, int] = {}
        self._in_flight: set[PageWrite] = set()
        self._stopping = False
        self.settled: deque[Write] = deque()
        self.asked = 0
        self.results = dict.fromkeys(WriteResult, 0)

    def __iter__(self) -> Iterator[Write]:
        """Yield the writes that own slots or holds, those among them that nobody asks for any more too."""
        return iter(self._owning)

    @property
    def backlog(self) -> int:
        """Dirty pages of components that are due, or with the storage already."""
        return len(self._queue) + len(self._in_flight)

    def find(self, write_id: str, now: float, tenant: int | None = None) -> Write:
        """Return a write that is open or committed, and is the tenant's if one is named.

        Raises NotFoundError, or GoneError for one that has expired.
        """
        write = self._known(write_id, tenant)
        if write is None:
            raise NotFoundError("no write with this id: unknown, dropped or forgotten", slug="unknown-write")
        if write.state is WriteState.EXPIRED or (write.state is WriteState.OPEN and write.expires_at <= now):
            raise GoneError("this write has expired before it was committed", slug="write-gone")
        return write

    def _known(self, write_id: str, tenant: int | None) -> Write | None:
        whole, dot, part = write_id.partition(".")
        write = self._by_id.get(whole)
        if write is None or tenant not in {None, write.tenant}:
            return None
        is_its = part in map(str, write.begun) if write.num_parts else not dot
        return write if is_its else None

    def require_room(self) -> None:
        """Raise CapacityError if there are as many as there may be."""
        if len(self._by_id) >= self.settings.max_writes:
            detail = f"{self.settings.max_writes} writes are known already; commit or drop some"
            raise CapacityError(detail, slug="limit-reached", retry_after_s=1.0)

    # ---- the engine's part

    def join(
        self,
        pool: ModelPool,
        keys: Sequence[bytes],
        tails: Mapping[int, Sequence[int]],
        share: Share,
        now: float,
        tenant: int = 0,
    ) -> Write | None:
        """Give a part of a write that another process has begun; None when there is none. Raises ConflictError."""
        write = self._shared.join(pool.layout, keys, tails, share, tenant)
        return write if write is None or write.expires_at > now else None

    def begin(
        self,
        pool: ModelPool,
        keys: Sequence[bytes],
        tails: Mapping[int, Sequence[int]],
        masks: Masks | None,
        now: float,
        tenant: int = 0,
        share: Share | None = None,
    ) -> Write:
        """Reserve slots for what is neither resident nor in L3 (`masks[c][i]`; None when L3 could not be asked).

        `tails[c]` are the pages that carry a state of tail component c. What does not fit is cut at a page: the
        reservation covers a prefix of `keys`. It evicts pages that it names itself only when nothing new fits
        otherwise: of a prefix longer than the pool, what L3 has makes room for what comes behind. A write without a
        slot has no parts.
        """
        wanted: list[list[int]] = []
        resident: list[list[int]] = []
        for c, component in enumerate(pool.layout.components):
            pages = sorted(tails.get(c, ())) if component.is_tail else range(len(keys))
            slots = {page: pool.index[c].find(keys[page]) for page in pages}
            wanted.append([p for p, slot in slots.items() if slot < 0 and not (masks is not None and masks[c][p])])
            resident.append([slot for slot in slots.values() if slot >= 0])
            pool.index[c].hold(resident[c], tenant)
        granted, reason = self._cut(pool, wanted, len(keys), tenant)
        if any(wanted) and not any(pages and pages[0] < granted for pages in wanted):
            for c, held in enumerate(resident):
                pool.index[c].release(reversed(held))
            resident = [[] for _ in wanted]
            granted, reason = self._cut(pool, wanted, len(keys), tenant)
        reserved = []
        for c, pages in enumerate(wanted):
            fitting = pages[: bisect_left(pages, granted)]
            reserved.append(dict(zip(fitting, pool.begin_writes(c, len(fitting), tenant), strict=True)))
        for c, held in enumerate(resident):
            pool.index[c].release(reversed(held))
        needed = {page for pages in wanted for page in pages}
        stored = tuple(page for page in range(len(keys)) if page not in needed)
        until = now + self.settings.expire_s
        write = self._add(pool.layout, reserved, until, tuple(keys), tails, granted, reason, stored)
        write.tenant = tenant
        write.timer = self._timers.put(until, partial(self._expire, write))
        self._by_id[write.id] = write
        if share is not None and write.reserved:
            self._shared.add(write, share)
        self.asked += len(keys)
        self.results[WriteResult.STORED] += len(stored)
        self.results[WriteResult.REFUSED] += sum(page >= granted for page in needed)
        return write

    def _cut(
        self, pool: ModelPool, wanted: Sequence[Sequence[int]], length: int, tenant: int
    ) -> tuple[int, WriteReason | None]:
        reason = None
        for c, pages in enumerate(wanted):
            unsettled, room = pool.unsettled(c), pool.write_room(c, tenant)
            allowed = max(1, int(pool.slots[c].capacity * self.settings.max_dirty_fraction)) - unsettled
            fits = max(0, min(allowed, room))
            if fits < len(pages) and pages[fits] < length:
                length = pages[fits]
                is_pressed = allowed < room or (allowed == room and unsettled)
                reason = WriteReason.BACK_PRESSURE if is_pressed else WriteReason.HOST_CAPACITY
        return length, reason

    def finish_part(self, write: Write, write_id: str) -> bool:
        """Note that a part, or a write of one process, is filled; say whether all of the write is."""
        if write.num_parts and write.state is WriteState.OPEN:
            write.there.add(int(write_id.rpartition(".")[2]))
        return not write.parts_left

    def commit(self, write: Write, on_arrival: Arrival, now: float) -> None:
        """Publish the pages of an open write: resident at once, dirty until L3 has them. Idempotent.

        A page that became resident meanwhile keeps its first copy. `on_arrival(load, jobs, slot)` is told who waited
        for a page that was being read: each of them has a hold on `slot` now.
        """
        if write.state is not WriteState.OPEN:
            return
        write.state = WriteState.COMMITTED
        self._shared.close(write)
        self._timers.take_back(write.timer)
        pool, reserved = self._pools[write.layout.name], write.reserved
        keys, granted, write.slots, write.keys = write.keys, write.slots, [], ()
        for c, slots in enumerate(granted):
            find = pool.index[c].find
            late = {page: slot for page, slot in slots.items() if find(keys[page]) >= 0}
            pool.drop_writes(c, late.values())
            fresh = {page: slot for page, slot in slots.items() if page not in late} if late else slots
            for load, jobs, slot in pool.commit_writes(c, fresh, keys):
                on_arrival(load, jobs, slot)
            write.held[c] = fresh
        self._put_all(write, keys)
        write.committed = len(write.waiting)
        write.duplicate = reserved - write.committed
        self.results[WriteResult.DUPLICATE] += write.duplicate
        self._settle_if_done(write, now)

    def drop(self, write_id: str, now: float, tenant: int | None = None) -> None:
        """Forget a write; an open one gives its slots back at once, what was committed goes on to L3. Idempotent.

        One that is not the tenant's, if one is named, stays as it is. An open write of which others fill parts ends
        too, but keeps its slots for as long as these may go on.
        """
        write = self._known(write_id, tenant)
        if write is None:
            return
        del self._by_id[write.id]
        was_open = write.state is WriteState.OPEN
        if was_open:
            self._end(write, WriteResult.DROPPED)
        if write.slots and len(write.begun) <= 1:
            self._take_back(write, now)
        elif write.slots and was_open:
            self._timers.take_back(write.timer)
            self._take_back_later(write, write.expires_at)
        elif not write.slots:
            self._timers.take_back(write.timer)

    def _expire(self, write: Write, now: float) -> None:
        self._end(write, WriteResult.EXPIRED)
        self._take_back_later(write, now)

    def _end(self, write: Write, result: WriteResult) -> None:
        write.state = WriteState.EXPIRED
        self._shared.close(write)
        self.results[result] += write.reserved
        self.settled.append(write)

    def _take_back_later(self, write: Write, ends_at: float) -> None:
        write.timer = self._timers.put(ends_at + self.settings.margin_s, partial(self._take_back, write))

    def _take_back(self, write: Write, now: float) -> None:
        """Free the slots of a write that nobody fills any more."""
        self._timers.take_back(write.timer)
        pool = self._pools[write.layout.name]
        for c, slots in enumerate(write.slots):
            pool.drop_writes(c, slots.values())
        write.slots, write.keys = [], ()
        self._forget_later(write, now)

    def _forget_later(self, write: Write, now: float) -> None:
        del self._owning[write]
        if write.id in self._by_id:
            write.timer = self._timers.put(now + self.settings.keep_done_s, partial(self._forget, write))

    def _forget(self, write: Write, _now: float) -> None:
        self._by_id.pop(write.id, None)

    # ---- what an earlier life left

    def adopt(self, pool: ModelPool, pages: Sequence[Sequence[tuple[int, int, bytes]]], now: float) -> None:
        """Queue dirty pages (page, slot, key), by component, that the pool has adopted as resident already."""
        if not any(pages):
            return
        write = self._add(pool.layout, [], now)
        write.state = WriteState.COMMITTED
        # Not by page: equal page numbers of different prefixes are different pages.
        places = sorted((page, c, slot, key) for c, found in enumerate(pages) for page, slot, key in found)
        for number, (_, c, slot, _) in enumerate(places):
            write.held[c][number] = slot
        for c, held in enumerate(write.held):
            pool.adopt_dirty(c, held.values())
        self._put_all(write, [key for _, _, _, key in places])
        write.committed = len(write.waiting)
        self.asked += write.committed
        self._settle_if_done(write, now)

    def quarantine(self, pool: ModelPool, slots: Sequence[Sequence[int]], now: float) -> None:
        """Keep slots, by component, out of use for as long as an engine may still be writing to them."""
        if not any(slots):
            return
        write = self._add(pool.layout, [dict(enumerate(found)) for found in slots], now)
        write.state = WriteState.EXPIRED
        for c, found in enumerate(slots):
            pool.adopt_lent(c, found)
        until = now + self.settings.expire_s + self.settings.margin_s
        write.timer = self._timers.put(until, partial(self._take_back, write))

    def _add(
        self,
        layout: ModelLayout,
        slots: list[dict[int, int]],
        expires_at: float,
        keys: Sequence[bytes] = (),
        tails: Mapping[int, Sequence[int]] | None = None,
        granted: int = 0,
        reason: WriteReason | None = None,
        stored: tuple[int, ...] = (),
    ) -> Write:
        write = Write(uuid.uuid4().hex, layout, keys, tails or {}, granted, reason, stored, slots, expires_at)
        write.held = [{} for _ in layout.components]
        self._owning[write] = None
        return write

    # ---- to L3

    def next_page(self) -> PageWrite | None:
        """Hand out the dirty page to store next; it must come back through `stored` or `not_stored`."""
        if not self._queue:
            return None
        one = self._queue.popleft()
        self._in_flight.add(one)
        return one

    def stored(self, one: PageWrite, now: float) -> None:
        """L3 has the page."""
        self._in_flight.remove(one)
        self._clean(one, now)

    def not_stored(self, one: PageWrite, now: float) -> None:
        """L3 did not take the page: it is tried again later, or given up after too many attempts.

        While the service stops, nothing is given up: the next one finds the page dirty, and goes on.
        """
        self._in_flight.remove(one)
        one.attempts += 1
        if one.attempts >= self.settings.max_attempts and not self._stopping:
            one.write.lost.add(one.page)
            self._clean(one, now)
            return
        when = now + self.settings.retry_after_s(one.attempts)
        self._retries[one] = self._timers.put(when, partial(self._retry, one))

    def stop(self) -> None:
        """Begin to stop: what waits for another attempt is due at once. Idempotent."""
        if not self._stopping:
            self._stopping = True
            for one, ticket in tuple(self._retries.items()):
                self._timers.take_back(ticket)
                self._retry(one, 0.0)

    def _retry(self, one: PageWrite, _now: float) -> None:
        del self._retries[one]
        self._queue.append(one)

    def _put_all(self, write: Write, keys: Sequence[bytes]) -> None:
        """Queue what a write holds, as L3 is read: a page with its states, in the order of the prefix."""
        write.waiting = Counter(chain.from_iterable(write.held))
        places = sorted((page, c) for c, held in enumerate(write.held) for page in held)
        self._queue += [PageWrite(write, c, page, keys[page], write.held[c][page]) for page, c in places]

    def _clean(self, one: PageWrite, now: float) -> None:
        write, page = one.write, one.page
        self._pools[write.layout.name].set_clean(one.component, one.slot)
        write.waiting[page] -= 1
        if not write.waiting[page]:
            del write.waiting[page]
            is_lost = page in write.lost
            write.failed += is_lost
            write.durable += not is_lost
            self.results[WriteResult.LOST if is_lost else WriteResult.DURABLE] += 1
            self._settle_if_done(write, now)

    def _settle_if_done(self, write: Write, now: float) -> None:
        if write.waiting:
            return
        pool = self._pools[write.layout.name]
        for c, held in enumerate(write.held):
            pool.index[c].release(reversed(held.values()))
        write.held = []
        write.waiting = {}  # emptied, it would keep room for all its pages as long as the write is remembered
        self.settled.append(write)
        self._forget_later(write, now)

    def check_integrity(self) -> None:
        """Compare writes, pages on their way and pools; raise with the numbers if the law is broken. O(dirty)."""
        self._shared.check_integrity()
        on_their_way = [*self._queue, *self._retries, *self._in_flight]
        for name, pool in self._pools.items():
            mine = [write for write in self._owning if write.layout.name == name]
            for c in range(len(pool.slots)):
                lent = [slot for write in mine if write.slots for slot in write.slots[c].values()]
                dirty = [one.slot for one in on_their_way if one.component == c and one.write.layout.name == name]
                pool.check_writes(c, lent, dirty)
        for one in on_their_way:
            if one.write.held[one.component].get(one.page) != one.slot or not one.write.waiting.get(one.page):
                raise RuntimeError(f"page {one.page} is on its way to L3, and its write does not hold or await it")
        counted = sum(self.results.values())
        for write in self._owning:
            counted += write.reserved if write.state is WriteState.OPEN else len(write.waiting)
        if counted != self.asked:
            raise RuntimeError(f"{self.asked} pages asked to write, {counted} accounted for")
