"""What CONTRACT sections 1 to 3 say about one prefix, computed the slow way: sets and loops, page by page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forestage.core.job import Job, Lengths, Reason
from forestage.core.layout import ModelLayout
from forestage.core.leases import Lease
from forestage.core.shared_index import SharedIndex
from forestage.core.slots import SlotState
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
        self,
        driver: EngineDriver,
        keys: Sequence[bytes],
        device_pages: int,
        *,
        without: Sequence[Job | Lease | None],
        tenant: str = "",
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
            for lease in (*driver.engine.leases, *driver.engine.pins):
                if lease not in without:
                    held.update(lease.slots[c])
            for write in driver.engine.writes:
                if write.held:
                    held.update(write.held[c].values())
        self.unsettled = [len(log.lent) + len(log.dirty) for log in driver.logs]
        kept = kept_for_writes(driver)
        self.left_to_writes = [max(0, n - used) for n, used in zip(kept, self.unsettled, strict=True)]
        self.driver, self.tenant = driver, tenant

    def resident(self, c: int, page: int) -> bool:
        return self.keys[page] in self.slot_of[c]

    def fits(self, length: int) -> bool:
        for c, needed in enumerate(needed_keys(self.layout, self.keys, self.device_pages, length)):
            taken = {self.slot_of[c][key] for key in needed if key in self.slot_of[c]} - self.held[c]
            to_read = sum(key not in self.slot_of[c] and key not in self.coming[c] for key in needed)
            pinned = len(self.held[c]) + self.in_use[c] + len(taken) + to_read
            if pinned > self.may_be_pinned[c] - self.left_to_writes[c] and (taken or to_read):
                return False
            if self.driver.settings.tenants and self.tenant:
                new = [self.slot_of[c][key] for key in needed if key in self.slot_of[c]]
                cost = sum(self.driver.pool.index[c].is_held(slot) is False for slot in new) + to_read
                if cost and not self.within_shares(c, cost, left=self.left_to_writes[c]):
                    return False
        return True

    def within_shares(self, c: int, cost: int, kept: Sequence[int] = (), left: int = 0) -> bool:
        """Say whether the tenant may pin so many more slots: within its maximum, and outside of the others' minima.

        `left` slots are out of its reach, too. `kept` are resident slots that it holds before that, whether it may or
        not.
        """
        index, slots = self.driver.pool.index[c], self.driver.pool.slots[c]
        assert isinstance(index, SharedIndex)
        shares = {share.name: share for share in self.driver.engine.tenants.shares}
        asking = self.tenant if self.tenant in shares else "default"
        accounts = [*shares, "before", "demoted"]
        used, pinned = dict.fromkeys(accounts, 0), dict.fromkeys(accounts, 0)
        minima = dict.fromkeys(accounts, 0)
        minima.update({name: int(slots.capacity * share.min_share + 1e-9) for name, share in shares.items()})
        account = {slot: accounts[n] for slot, n in enumerate(index._account) if n < len(accounts)}
        for slot, owner in account.items():
            used[owner] += 1
            pinned[owner] += slots.state(slot) is not SlotState.RESIDENT or index.is_held(slot)
        for slot in kept:
            if not index.is_held(slot):
                owner = account[slot]
                payer = asking if used[owner] > minima[owner] else owner
                used[owner] -= 1
                used[payer] += 1
                pinned[payer] += 1
        pinned[asking] += cost
        others = [name for name in accounts if name != asking]
        pinnable = self.may_be_pinned[c]
        least = {name: int(pinnable * shares[name].min_share + 1e-9) if name in shares else 0 for name in others}
        most = max(1, int(slots.capacity * shares[asking].max_share + 1e-9))
        return (
            pinned[asking] + sum(max(pinned[name], least[name]) for name in others) <= pinnable - left
            and pinned[asking] + sum(max(pinned[name], minima[name]) for name in others) <= slots.capacity - left
            and pinned[asking] <= most
        )

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
    tenant: str = "default",
) -> Expected:
    """Say what a prefetch would find and be granted now; what `asking` itself holds does not stand in its way."""
    pool, layout = _Pool(driver, keys, device_pages, without=[asking], tenant=tenant), driver.layout

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
    """Return the largest boundary at most `limit` that could be leased now, `lease` not standing in its way.

    Shares of tenants are left out: they may make it less.
    """
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
    driver: EngineDriver, keys: Sequence[bytes], tails: Mapping[int, Sequence[int]], asked: bool, tenant: str
) -> tuple[int, list[int], list[set[int]]]:
    """Say what a write of a prefix would get now: granted pages, those that need nothing, and by component what else.

    `asked` says that L3 can say what it has.
    """
    pool, layout = _Pool(driver, keys, 0, without=[], tenant=tenant), driver.layout
    wanted: list[set[int]] = []
    pinned: list[int] = []
    kept: list[list[int]] = []
    for c, component in enumerate(layout.components):
        named = set(tails.get(c, ())) if component.is_tail else set(range(len(keys)))
        resident = {page for page in named if pool.resident(c, page)}
        wanted.append({page for page in named - resident if not (asked and (c, keys[page]) in driver.stored)})
        kept.append([pool.slot_of[c][keys[page]] for page in sorted(resident)])
        pinned.append(len(pool.held[c] | {pool.slot_of[c][keys[page]] for page in resident}) + pool.in_use[c])

    def fits(length: int, keep: bool) -> bool:
        for c, pages in enumerate(wanted):
            number = sum(page < length for page in pages)
            may_be_dirty = max(1, int(driver.capacities[c] * driver.settings.writes.max_dirty_fraction))
            taken = pinned[c] if keep else len(pool.held[c]) + pool.in_use[c]
            too_many = number + pool.unsettled[c] > may_be_dirty or number + taken > pool.may_be_pinned[c]
            own = kept[c] if keep else []
            if number and (too_many or (driver.settings.tenants and not pool.within_shares(c, number, own))):
                return False
        return True

    granted = max(length for length in range(len(keys) + 1) if fits(length, keep=True))
    if not any(page < granted for pages in wanted for page in pages):
        # What it names itself stays only where that leaves room for anything new.
        granted = max(length for length in range(len(keys) + 1) if fits(length, keep=False))
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
