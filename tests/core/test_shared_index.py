"""SharedIndex: whose account a slot is on, whose page goes first, and how much room a tenant has."""

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forestage.core.shared_index import SharedIndex
from forestage.core.tenants import Tenants, TenantShare
from support.engine_driver import chain

NOBODY, A, B = 0, 1, 2  # `default`, and the tenants in the order of `_shares`


def _index(capacity: int, a: float, b: float, *, a_max: float = 1.0) -> SharedIndex:
    return SharedIndex(capacity, Tenants([TenantShare("a", a, a_max), TenantShare("b", b)]).shares)


def _bring(index: SharedIndex, tenant: int, name: str, pages: int, first_slot: int) -> list[int]:
    slots = list(range(first_slot, first_slot + pages))
    for slot, key in zip(slots, chain(name, pages), strict=True):
        index.charge(slot, tenant)
        index.insert(slot, key, 1)
    return slots


def _idle(index: SharedIndex, tenant: int, name: str, pages: int, first_slot: int) -> list[int]:
    slots = _bring(index, tenant, name, pages, first_slot)
    index.release(reversed(slots))
    return slots


@pytest.mark.parametrize(
    ("pages_of_a", "pages_of_b", "asking", "victims"),
    [
        (5, 5, A, "aaaaab"),  # equally above their minima of 2: who asks pays, as long as it has an idle page
        (8, 2, B, "aaabba"),  # until b has as much, then its own, and again when it has no idle page
        (8, 2, NOBODY, "aaaaaa"),
        (2, 8, B, "bbbbbb"),
        (2, 2, A, "aa"),  # b is at its minimum: nothing of it goes for a
        (1, 6, A, "bbba"),  # until a has more above its minimum than b
    ],
)
def test_whose_page_goes_first(pages_of_a: int, pages_of_b: int, asking: int, victims: str) -> None:
    index = _index(10, 0.2, 0.2)
    _idle(index, A, "a", pages_of_a, 0)
    _idle(index, B, "b", pages_of_b, pages_of_a)
    gone = ""
    for _ in victims:
        key = [index.key_of(slot) for slot in range(10)]
        slot = index.evict_for(asking)
        gone += chr((key[slot] or b"?")[0])
        index.charge(slot, asking)  # it is taken for a page of who asks
        index.check_integrity()
    assert gone == victims


def test_at_its_maximum_a_tenant_loses_its_own_oldest_page_even_if_others_have_more() -> None:
    index = _index(10, 0, 0, a_max=0.3)
    _idle(index, B, "b", 7, 0)
    slots = _idle(index, A, "a", 3, 7)
    assert index.evict_for(A) == slots[-1]


def test_a_page_moves_to_who_takes_hold_of_it_but_not_below_a_minimum() -> None:
    index = _index(10, 0.2, 0)
    slots = _idle(index, A, "a", 4, 0)
    index.hold(slots, B)
    assert index.charged[A:] == [2, 2, 0, 0]
    index.hold(slots, NOBODY)  # held by b as well: it stays where it is
    assert index.charged[A:] == [2, 2, 0, 0]
    index.release(reversed(slots))
    index.release(reversed(slots))
    index.hold(slots, A)
    assert index.charged[A:] == [4, 0, 0, 0]
    index.check_integrity()


def test_a_demoted_page_goes_before_all_others_until_it_is_wanted_again() -> None:
    index = _index(10, 0.4, 0.4)
    a, b = _idle(index, A, "a", 4, 0), _idle(index, B, "b", 6, 4)
    index.demote(a[2:])
    assert [index.evict_for(B), index.evict_for(A)] == [a[3], a[2]]
    index.demote(b[:1])
    index.hold(b[:1], B)
    index.release(b[:1])
    assert index.charged[A:] == [2, 6, 0, 0]
    assert index.evict_for(A) == b[5]
    index.check_integrity()


def test_room_leaves_the_minima_of_the_others_and_the_own_maximum() -> None:
    index = _index(10, 0.2, 0.3, a_max=0.6)
    assert [index.room(tenant, 10) for tenant in (NOBODY, A, B)] == [5, 6, 8]
    held = _bring(index, A, "a", 3, 0)
    assert [index.room(tenant, 7) for tenant in (NOBODY, A, B)] == [4, 3, 7]
    index.release(reversed(held))
    _bring(index, B, "b", 7, 3)
    assert [index.room(tenant, 0) for tenant in (NOBODY, A, B)] == [1, 3, 1]


def test_fractions_are_taken_as_written() -> None:
    share = TenantShare("a", 0.29, 0.7)
    assert (share.minimum(100), share.maximum(10)) == (29, 7)  # 0.29 * 100 is less than 29 in binary
    assert (TenantShare("a", 0.1).minimum(9), TenantShare("a", 0, 0.1).maximum(9)) == (0, 1)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(0, 100), min_size=1, max_size=8), st.integers(1, 400))
def test_all_minima_fit_together(weights: list[int], capacity: int) -> None:
    total = max(100, sum(weights))
    shares = [TenantShare(f"t{number}", int(weight / total * 1000) / 1000) for number, weight in enumerate(weights)]
    assert sum(share.minimum(capacity) for share in shares) <= capacity


class SharedIndexMachine(RuleBasedStateMachine):
    """Against plain lists: accounts and orders by tenant, pages brought, held, released, demoted and evicted."""

    @initialize(
        capacity=st.integers(1, 12),
        shares=st.sampled_from([((0.3, 1.0), (0.3, 0.5)), ((0, 0.4), (0, 1.0)), ((0.5, 0.5), (0.5, 1.0))]),
    )
    def build(self, capacity: int, shares: tuple[tuple[float, float], tuple[float, float]]) -> None:
        (a, a_max), (b, b_max) = shares
        self.shares = Tenants([TenantShare("a", a, a_max), TenantShare("b", b, b_max)]).shares
        self.index = SharedIndex(capacity, self.shares)
        self.capacity = capacity
        self.minimum = [int(capacity * share.min_share + 1e-9) for share in self.shares] + [0, 0]
        self.maximum = [max(1, int(capacity * share.max_share + 1e-9)) for share in self.shares] + [capacity, capacity]
        self.account: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self.idle: list[OrderedDict[int, None]] = [OrderedDict() for _ in self.minimum]
        self.free = list(range(capacity))
        self.brought = 0

    def _used(self, account: int) -> int:
        return sum(at == account for at in self.account.values())

    def _room(self, tenant: int) -> int:
        pinned = [sum(self.account[slot] == number for slot in self.held) for number in range(len(self.minimum))]
        room = 0
        while room < self.capacity:
            pinned[tenant] += 1
            promised = sum(map(max, pinned, self.minimum))
            if promised > self.capacity or pinned[tenant] > self.maximum[tenant]:
                break
            room += 1
        return room

    @rule(tenant=st.integers(0, 2))
    def bring(self, tenant: int) -> None:
        room = self._room(tenant)
        assert max(0, self.index.room(tenant, len(self.free))) == room
        if not room:
            return
        if not self.free:
            self._evict(tenant)
        slot = self.free.pop()
        self.index.charge(slot, tenant)
        self.account[slot] = tenant
        self.held[slot] = 1
        while self._used(tenant) > self.maximum[tenant] and self.idle[tenant]:
            assert self.index.above_maximum(tenant)
            self._evict(tenant)
        assert not self.index.above_maximum(tenant)
        self.brought += 1
        self.index.insert(slot, b"%d" % self.brought, 1)

    def _evict(self, tenant: int) -> None:
        slot = self.index.evict_for(tenant)
        account = self.account.pop(slot)
        assert next(iter(self.idle[account])) == slot
        del self.idle[account][slot]
        self.free.append(slot)
        if account == tenant or account == len(self.shares) + 1:
            return
        # Another one's page goes only from above its minimum, and only of who has most above it.
        assert self._used(account) + 1 > self.minimum[account]
        above_maximum = {n for n in range(len(self.shares)) if self._used(n) + (n == account) > self.maximum[n]}
        if account not in above_maximum:
            over = self._used(account) + 1 - self.minimum[account]
            others = [n for n in range(len(self.shares)) if self.idle[n] and n != account]
            assert all(self._used(n) - self.minimum[n] <= over for n in others)
            assert not any(self.idle[n] for n in above_maximum - {tenant})

    @precondition(lambda self: self.account)
    @rule(number=st.integers(0, 99), tenant=st.integers(0, 2))
    def hold(self, number: int, tenant: int) -> None:
        slot = sorted(self.account)[number % len(self.account)]
        if slot not in self.held:
            if not self._room(tenant):
                return
            owner = self.account[slot]
            del self.idle[owner][slot]
            if self._used(owner) > self.minimum[owner]:
                self.account[slot] = tenant
        self.held[slot] = self.held.get(slot, 0) + 1
        self.index.hold([slot], tenant)

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 99))
    def release(self, number: int) -> None:
        slot = sorted(self.held)[number % len(self.held)]
        self.index.release([slot])
        self.held[slot] -= 1
        if not self.held[slot]:
            del self.held[slot]
            self.idle[self.account[slot]][slot] = None

    @precondition(lambda self: any(self.idle))
    @rule(number=st.integers(0, 99), drop=st.booleans())
    def demote_or_drop(self, number: int, drop: bool) -> None:
        slots = [slot for order in self.idle for slot in order]
        slot = slots[number % len(slots)]
        account = self.account.pop(slot)
        del self.idle[account][slot]
        if drop:
            self.index.drop(slot)
            self.free.append(slot)
            return
        self.index.demote([slot])
        self.account[slot] = len(self.shares) + 1
        self.idle[-1][slot] = None
        self.idle[-1].move_to_end(slot, last=False)

    @invariant()
    def agree(self) -> None:
        index = self.index
        index.check_integrity()
        index.check_holds(self.held)
        assert [list(index._orders.slots(account)) for account in range(len(self.minimum))] == [
            list(order) for order in self.idle
        ]
        assert index.charged == [self._used(number) for number in range(len(self.minimum))]
        assert (index.evictable, index.held) == (sum(map(len, self.idle)), len(self.held))
        assert index.evictable == sum(map(len, self.idle))


TestSharedIndex = SharedIndexMachine.TestCase
TestSharedIndex.settings = settings(
    max_examples=50, stateful_step_count=50, derandomize=True, database=None, deadline=None
)
