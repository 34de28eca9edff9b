"""What CONTRACT sections 1 to 3 say about one prefix, computed the slow way: sets and loops, page by page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forestage.core.job import Job, Lengths, Reason
from forestage.core.layout import ModelLayout
from forestage.core.leases import Lease
from support.engine_driver import EngineDriver

__all__ = [
    "Expected",
    "check_shortfall",
    "expect_plan",
    "expect_write",
    "is_boundary",
    "kept_for_writes",
    "largest_usable",
    "needed_keys",
]

There = Callable[[int, int], bool]


@dataclass(frozen=True)
class Expected:
    """Lengths in pages; `usable` is the largest boundary that could be had without a read."""

    host: int
    stored: int
    restorable: int
    granted: int
    usable: int


def needed_keys(layout: ModelLayout, keys: Sequence[bytes], device_pages: int, length: int) -> list[tuple[bytes, ...]]:
    """Return, by component, the keys whose payload the restored prefix of `length` needs in the pool."""
    needed = []
    for component in layout.components:
        pages = []
        for page in range(length):
            if page < device_pages:
                continue
            if component.is_tail and page < length - component.window:
                continue
            pages.append(keys[page])
        needed.append(tuple(pages))
    return needed


def is_boundary(layout: ModelLayout, device_pages: int, length: int, there: There) -> bool:
    """Say whether a prefix length is a boundary, when `there(component, page)` says what is there."""
    for c, component in enumerate(layout.components):
        if component.is_tail:
            for page in range(device_pages, length):
                if page >= length - component.window and not there(c, page):
                    return False
    return True


def _longest(layout: ModelLayout, device_pages: int, requested: int, there: There) -> int:
    length = device_pages
    while length < requested and all(there(c, length) for c in layout.every_page):
        length += 1
    return length


class _Pool:
    """What is in the pool of a driver for one prefix, and what of it stands in the way of somebody."""

    def __init__(
        self, driver: EngineDriver, keys: Sequence[bytes], device_pages: int, *, without: Sequence[Job | Lease | None]
    ) -> None:
        pool, self.layout = driver.pool, driver.layout
        self.keys, self.device_pages = keys, device_pages
        self.slot_of = [{key: slot for slot, key in enumerate(log.visible) if key is not None} for log in driver.logs]
        self.coming = [set(loads) for loads in pool.loads]
        self.held = [set[int]() for _ in driver.logs]
        self.in_use = [slots.reserved + slots.filling for slots in pool.slots]
        self.may_be_pinned = [max(1, int(slots.capacity * driver.pinned_fraction)) for slots in pool.slots]
        for c, held in enumerate(self.held):
            for job in driver.engine.live:
                if job not in without:
                    held.update(job.holds[c].values())
            for lease in driver.engine.leases:
                if lease not in without:
                    held.update(lease.slots[c])
            for write in driver.engine.writes:
                if write.held:
                    held.update(write.held[c].values())
        self.unsettled = [len(log.lent) + len(log.dirty) for log in driver.logs]
        kept = kept_for_writes(driver)
        self.left_to_writes = [max(0, n - used) for n, used in zip(kept, self.unsettled, strict=True)]

    def resident(self, c: int, page: int) -> bool:
        return self.keys[page] in self.slot_of[c]

    def fits(self, length: int) -> bool:
        for c, needed in enumerate(needed_keys(self.layout, self.keys, self.device_pages, length)):
            taken = {self.slot_of[c][key] for key in needed if key in self.slot_of[c]} - self.held[c]
            to_read = sum(key not in self.slot_of[c] and key not in self.coming[c] for key in needed)
            pinned = len(self.held[c]) + self.in_use[c] + len(taken) + to_read
            if pinned > self.may_be_pinned[c] - self.left_to_writes[c] and (taken or to_read):
                return False
        return True

    def largest(self, limit: int, there: There) -> int:
        """Return the largest boundary at most `limit` that fits."""
        length = limit
        while length > self.device_pages:
            if is_boundary(self.layout, self.device_pages, length, there) and self.fits(length):
                return length
            length -= 1
        return self.device_pages


def expect_plan(
    driver: EngineDriver,
    keys: Sequence[bytes],
    device_pages: int,
    masks: Sequence[bytes | bytearray] | None,
    asking: Job | None = None,
    *,
    loading: bool = True,
) -> Expected:
    """Say what a prefetch would find and be granted now; what `asking` itself holds does not stand in its way."""
    pool, layout = _Pool(driver, keys, device_pages, without=[asking]), driver.layout

    def there(c: int, page: int) -> bool:
        on_its_way = loading and keys[page] in pool.coming[c]
        return pool.resident(c, page) or on_its_way or (masks is not None and masks[c][page] == 1)

    host = _longest(layout, device_pages, len(keys), pool.resident)
    stored = _longest(layout, device_pages, len(keys), there)
    restorable = stored
    while restorable > device_pages and not is_boundary(layout, device_pages, restorable, there):
        restorable -= 1
    granted = pool.largest(restorable, there)
    return Expected(host, stored, restorable, granted, pool.largest(min(host, granted), pool.resident))


def largest_usable(
    driver: EngineDriver, keys: Sequence[bytes], device_pages: int, limit: int, lease: Lease | None
) -> int:
    """Return the largest boundary at most `limit` that could be leased now, `lease` not standing in its way."""
    pool = _Pool(driver, keys, device_pages, without=[lease])
    return pool.largest(min(limit, _longest(driver.layout, device_pages, len(keys), pool.resident)), pool.resident)


def kept_for_writes(driver: EngineDriver) -> list[int]:
    """Return how many slots of each component are beyond the reach of prefetches as long as no write uses any."""
    kept = []
    for capacity in driver.capacities:
        may_be_pinned = max(1, int(capacity * driver.pinned_fraction))
        kept.append(min(int(capacity * driver.write_reserve), may_be_pinned - 1))
    return kept


def expect_write(
    driver: EngineDriver, keys: Sequence[bytes], tails: Mapping[int, Sequence[int]], asked: bool
) -> tuple[int, list[int], list[set[int]]]:
    """Say what a write of a prefix would get now: granted pages, those that need nothing, and by component what else.

    `asked` says that L3 can say what it has.
    """
    pool, layout = _Pool(driver, keys, 0, without=[]), driver.layout
    wanted: list[set[int]] = []
    pinned: list[int] = []
    for c, component in enumerate(layout.components):
        named = set(tails.get(c, ())) if component.is_tail else set(range(len(keys)))
        resident = {page for page in named if pool.resident(c, page)}
        wanted.append({page for page in named - resident if not (asked and (c, keys[page]) in driver.stored)})
        pinned.append(len(pool.held[c] | {pool.slot_of[c][keys[page]] for page in resident}) + pool.in_use[c])

    def fits(length: int) -> bool:
        for c, pages in enumerate(wanted):
            number = sum(page < length for page in pages)
            may_be_dirty = max(1, int(driver.capacities[c] * driver.settings.writes.max_dirty_fraction))
            too_many = number + pool.unsettled[c] > may_be_dirty or number + pinned[c] > pool.may_be_pinned[c]
            if number and too_many:
                return False
        return True

    granted = max(length for length in range(len(keys) + 1) if fits(length))
    stored = [page for page in range(len(keys)) if not any(page in pages for pages in wanted)]
    return granted, stored, [{page for page in pages if page < granted} for pages in wanted]


def check_shortfall(lengths: Lengths, shortfall: dict[Reason, int], *, granted: bool, unavailable: bool) -> None:
    """Check that every missing page of a finished job has exactly the reason that the contract gives it.

    `granted` says whether the job came to a grant; if not, all that is missing is due to what stopped it.
    """
    rest = dict(shortfall)
    if granted:
        span = Reason.STORAGE_UNAVAILABLE if unavailable else Reason.NOT_STORED
        assert rest.pop(span, 0) == lengths.requested - lengths.stored
        assert rest.pop(Reason.NO_BOUNDARY, 0) == lengths.stored - lengths.restorable
        assert rest.pop(Reason.HOST_CAPACITY, 0) == lengths.restorable - lengths.granted
    missing = (lengths.granted if granted else lengths.requested) - lengths.ready
    stops = set(rest) - {Reason.NOT_STORED, Reason.STORAGE_UNAVAILABLE, Reason.NO_BOUNDARY, Reason.HOST_CAPACITY}
    assert len(rest) == len(stops) == (missing > 0)
    assert sum(rest.values()) == missing
