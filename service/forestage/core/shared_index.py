"""The resident pages of one component that tenants share: on whose account each slot is, and whose page goes first.

Law: every slot that a load or a page has is on one account, and `charged[t]` counts those of tenant t; an account's
order of eviction holds exactly its resident pages that nobody holds. `pinned(t)` is what is on an account and not in
its order. The sum over tenants of max(pinned, minimum) never exceeds the capacity, so that whatever the others have
taken, a tenant that wants to come up to its minimum finds slots that can be evicted.

A page is on the account of who brought it. Taking hold of it while nobody else does moves it to the holder's, unless
its owner would fall below the minimum by that. Two accounts are no tenant's and have no minimum: what was in the pool
at the start is on one, demoted pages, which go before all others, on the other.

Within one account an ancestor goes after its descendants; across accounts it may go first, and what it led to then goes
by its own rank and age. What is worth keeping each account learns from its own pages alone, so that a flood of another
tenant teaches it nothing.
"""

from collections.abc import Iterable, Sequence

from forestage.core.eviction import AGAIN, NEW, PASSING
from forestage.core.index import PageIndex
from forestage.core.tenants import TenantShare

__all__ = ["SharedIndex"]

_NO_ACCOUNT = 255


class SharedIndex(PageIndex):
    """A PageIndex with an order of eviction for each tenant. O(1) a page; O(tenants) to find room or a victim.

    Of what may be pinned at all, `pinnable` slots, each tenant is promised its share too.
    """

    def __init__(self, capacity: int, shares: Sequence[TenantShare], pinnable: int | None = None) -> None:
        super().__init__(capacity, len(shares) + 2)
        self._pinnable = capacity if pinnable is None else pinnable
        self._pinned_minimum = [*(share.minimum(self._pinnable) for share in shares), 0, 0]
        # Two accounts that are no tenant's: of what was there at the start, and of demoted pages.
        self.minimum = [*(share.minimum(capacity) for share in shares), 0, 0]
        self.maximum = [*(share.maximum(capacity) for share in shares), capacity, capacity]
        self.charged = [0] * len(self.minimum)
        self._inherited = len(shares)
        self._demoted = len(shares) + 1
        self._account = bytearray([_NO_ACCOUNT]) * capacity

    def pinned(self, tenant: int) -> int:
        """Slots on an account that cannot be evicted now: on their way, or held."""
        return self.charged[tenant] - self._orders.count(tenant)

    def room(self, tenant: int, free: int, kept: int = 0) -> int:
        """Slots that a tenant may reserve or hold now, of those that are `free` or evictable.

        Within its maximum, and so that all others could still come up to their minima, with `kept` slots left beside.
        """
        pinned = list(map(int.__sub__, self.charged, self._idle_pages()))
        own, pinned[tenant] = pinned[tenant], 0
        room = free + sum(self.charged) - own
        room += self.minimum[tenant] - sum(map(max, pinned, self.minimum))
        if self._pinnable < self._capacity:
            promised = sum(map(max, pinned, self._pinned_minimum)) - self._pinned_minimum[tenant]
            room = min(room, self._pinnable - own - promised)
        return min(room - kept, self.maximum[tenant] - own)

    def _idle_pages(self) -> list[int]:
        return list(map(self._orders.count, range(len(self.charged))))

    def above_maximum(self, tenant: int) -> bool:
        """Say whether a tenant has more than it may, and a page of its own to lose."""
        return self.charged[tenant] > self.maximum[tenant] and self._orders.count(tenant) > 0

    def charge(self, slot: int, tenant: int) -> None:
        """A slot was taken for a page that a tenant wants."""
        if self._account[slot] != _NO_ACCOUNT:
            raise RuntimeError(f"slot {slot} is on account {self._account[slot]} already")
        self._account[slot] = tenant
        self.charged[tenant] += 1

    def uncharge(self, slot: int) -> None:
        """A slot was given back."""
        self.charged[self._account[slot]] -= 1
        self._account[slot] = _NO_ACCOUNT

    def insert(self, slot: int, key: bytes, holds: int, *, fresh: bool = True) -> None:
        if self._account[slot] == _NO_ACCOUNT:
            self.charge(slot, self._inherited)  # nobody asked for it here
        super().insert(slot, key, holds, fresh=fresh)

    def hold(self, slots: Iterable[int], tenant: int = 0, *, again: bool = False) -> None:
        holds, charged = self._holds, self.charged
        for slot in slots:
            if not holds[slot]:
                owner = self._account[slot]
                self._orders.remove(slot, self._line_of(slot))
                if owner != tenant and charged[owner] > self.minimum[owner]:
                    charged[owner] -= 1
                    charged[tenant] += 1
                    self._account[slot] = tenant
                if again:
                    self._rank[slot] = AGAIN
                    if self._sampled[slot]:
                        self._note_return(slot)
                elif self._rank[slot] == PASSING:
                    self._rank[slot] = NEW
            holds[slot] += 1

    def _size_of(self, account: int) -> int:
        return max(1, self.charged[account], self.minimum[account])

    def demote(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._orders.remove(slot, self._line_of(slot))
            self.uncharge(slot)
            self.charge(slot, self._demoted)
            self._rank[slot] = PASSING
            self._orders.add_first(slot, self._line_of(slot))

    def evict(self, count: int) -> list[int]:
        return [self.evict_for(0) for _ in range(count)]

    def evict_for(self, tenant: int) -> int:
        """Drop the page that goes first when `tenant` wants a slot, and return its slot; there must be one."""
        slot = self._orders.pop(self._victim(tenant))
        self.evicted += 1
        self._forget(slot)
        return slot

    def _victim(self, tenant: int) -> int:
        """Choose whose oldest page goes for a slot that `tenant` wants.

        In this order: its own when it is at its maximum; a demoted one; one of who is above a maximum; one of who is
        most above its minimum, itself among equals; and, when all others are at most at theirs, its own.
        """
        idle, charged = self._idle_pages(), self.charged
        if charged[tenant] >= self.maximum[tenant] and idle[tenant]:
            return tenant
        if idle[self._demoted]:
            return self._demoted
        victim, most = tenant, charged[tenant] - self.minimum[tenant] if idle[tenant] else 0
        for other in range(self._demoted):
            if idle[other] and other != tenant:
                over = charged[other] - self.minimum[other]
                if charged[other] > self.maximum[other]:
                    over += self._capacity
                if over > max(most, 0):
                    victim, most = other, over
        return victim

    def _forget(self, slot: int) -> None:
        super()._forget(slot)
        self.uncharge(slot)

    def check_integrity(self) -> None:
        super().check_integrity()
        counted = [self._account.count(number) for number in range(len(self.charged))]
        if counted != self.charged:
            raise RuntimeError(f"slots by account {self.charged}, recounted {counted}")
        promised = sum(max(self.pinned(number), self.minimum[number]) for number in range(self._inherited))
        if promised > self._capacity:
            raise RuntimeError(f"{promised} slots are pinned or promised, of {self._capacity}")
        for number, maximum in enumerate(self.maximum):
            if self.pinned(number) > maximum:
                raise RuntimeError(f"{self.pinned(number)} slots of account {number} are pinned, at most {maximum} may")
