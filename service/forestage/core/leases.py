"""Time-limited holds on resident pages: leases, whose slots are handed out, and pins, whose slots are not.

Law: a lease that is alive owns exactly one hold on each of its slots; a lease that has ended owns none.
"""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from forestage.core.errors import CapacityError, GoneError
from forestage.core.job import Lengths
from forestage.core.model_pool import ModelPool
from forestage.core.timers import Timers

__all__ = ["Lease", "Leases"]


@dataclass(slots=True, eq=False)
class Lease:
    """A promise that named slots are neither evicted nor rewritten until `expires_at` (seconds of the engine's clock).

    `slots[c]` are the slots of component c in page order: from `device_pages` on for every_page components,
    the window ending at `length` for tail components.
    """

    id: str
    model: str
    device_pages: int
    length: int
    slots: tuple[tuple[int, ...], ...]
    expires_at: float
    tenant: int = 0  # whose it is
    alive: bool = True
    timer: int = 0


class Leases:
    """Leases by id. `max_s` bounds how far from now a lease can end; their ends are among the `timers`.

    `uses` says whether taking, renewing and releasing one means that its pages are used. Callers get no more than
    `most`; jobs that were let in before get theirs.
    """

    def __init__(
        self,
        pools: Mapping[str, ModelPool],
        max_s: float,
        timers: Timers[Callable[[float], None]],
        *,
        uses: bool = True,
        most: int = 2**24,
    ) -> None:
        self._pools = pools
        self._max_s = max_s
        self._uses = uses
        self._most = most
        self._timers = timers
        self._by_id: dict[str, Lease] = {}
        self.expired = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._by_id.values())

    def knows(self, lease_id: str, tenant: int | None = None) -> bool:
        """Say whether a lease of this id is alive, and the tenant's if one is named."""
        return self._find(lease_id, tenant) is not None

    def require_room(self) -> None:
        """Raise CapacityError if there are as many as there may be."""
        if len(self._by_id) >= self._most:
            raise CapacityError(
                f"{self._most} of these are held already; release some", slug="limit-reached", retry_after_s=1.0
            )

    def take(
        self, model: str, keys: Sequence[bytes], device_pages: int, lease_s: float, now: float, tenant: int = 0
    ) -> tuple[Lengths, Lease | None]:
        """Lease the resident restorable prefix, within the room of a tenant. Raises CapacityError.

        L3 is not asked, so `stored` counts only what is resident.
        """
        self.require_room()
        pool = self._pools[model]
        prefix = pool.survey(keys, device_pages, None, loading=False)
        plan = pool.plan(prefix, tenant)
        length = plan.granted
        lengths = Lengths(len(keys), plan.host, plan.stored, plan.restorable, length, length)
        if length == device_pages:
            return lengths, None
        slots = []
        for index, pages in zip(pool.index, prefix.ranges(length), strict=True):
            slots.append(tuple(index.slots_of(keys[pages.start : pages.stop])))
            index.hold(slots[-1], tenant, again=True)
        lease = self.take_over(model, device_pages, length, tuple(slots), lease_s, now, tenant)
        self._mark_used(lease)
        return lengths, lease

    def take_over(
        self,
        model: str,
        device_pages: int,
        length: int,
        slots: tuple[tuple[int, ...], ...],
        lease_s: float,
        now: float,
        tenant: int = 0,
    ) -> Lease:
        """Make a lease of holds that the caller has; they are the lease's from now on."""
        lease = Lease(uuid.uuid4().hex, model, device_pages, length, slots, now, tenant)
        self._by_id[lease.id] = lease
        self._set_end(lease, now + min(lease_s, self._max_s))
        return lease

    def renew(self, lease_id: str, lease_s: float, now: float, tenant: int | None = None) -> Lease:
        """Let a lease end `lease_s` seconds from now.

        Raises GoneError if it has ended, or is not the tenant's if one is named.
        """
        lease = self._find(lease_id, tenant)
        if lease is None or lease.expires_at <= now:
            raise GoneError("this lease has expired or never existed")
        self._set_end(lease, now + min(lease_s, self._max_s))
        self._mark_used(lease)
        return lease

    def release(self, lease_id: str, tenant: int | None = None) -> None:
        """End a lease that its holder is done with, if it is the tenant's where one is named. Idempotent."""
        lease = self._find(lease_id, tenant)
        if lease is not None:
            self._mark_used(lease)
            self._end(lease)

    def _find(self, lease_id: str, tenant: int | None) -> Lease | None:
        lease = self._by_id.get(lease_id)
        return lease if lease is None or tenant in {None, lease.tenant} else None

    def _set_end(self, lease: Lease, when: float) -> None:
        self._timers.take_back(lease.timer)
        lease.expires_at = when
        lease.timer = self._timers.put(when, partial(self._expire, lease))

    def _expire(self, lease: Lease, _now: float) -> None:
        self.expired += 1
        self._end(lease)

    def _mark_used(self, lease: Lease) -> None:
        if not self._uses:
            return
        for c, slots in enumerate(lease.slots):
            self._pools[lease.model].index[c].mark_used(slots)

    def _end(self, lease: Lease) -> None:
        lease.alive = False
        self._timers.take_back(lease.timer)
        del self._by_id[lease.id]
        for c, slots in enumerate(lease.slots):
            self._pools[lease.model].index[c].release(reversed(slots))
