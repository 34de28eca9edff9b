"""What is evicted before what: ranks, returns, wanted pages, and what a pool learns from pages that come back."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forestage.core.eviction import AGAIN, NEW, PASSING, WANTED, EvictionOrders
from forestage.core.index import PageIndex
from forestage.core.reuse import REACH, ReuseDistances, SeenPages
from support.engine_driver import chain


class OrdersMachine(RuleBasedStateMachine):
    """Against plain lists."""

    @initialize(accounts=st.integers(1, 3))
    def build(self, accounts: int) -> None:
        self.orders = EvictionOrders(20, accounts)
        self.lines: list[list[int]] = [[] for _ in range(4 * accounts)]
        self.accounts = accounts

    @rule(slot=st.integers(0, 19), line=st.integers(0, 11), first=st.booleans())
    def add(self, slot: int, line: int, first: bool) -> None:
        line %= len(self.lines)
        if any(slot in each for each in self.lines):
            return
        self.orders.rank[slot] = min(line % 4, AGAIN)
        (self.orders.add_first if first else self.orders.add)(slot, line)
        self.lines[line].insert(0 if first else len(self.lines[line]), slot)

    @precondition(lambda self: any(self.lines))
    @rule(number=st.integers(0, 99))
    def remove(self, number: int) -> None:
        places = [(slot, line) for line, slots in enumerate(self.lines) for slot in slots]
        slot, line = places[number % len(places)]
        self.orders.remove(slot, line)
        self.lines[line].remove(slot)

    @rule(account=st.integers(0, 2))
    def pop(self, account: int) -> None:
        account %= self.accounts
        lines = [line for line in self.lines[4 * account : 4 * account + 4] if line]
        if lines:
            assert self.orders.pop(account) == lines[0].pop(0)
        else:
            with pytest.raises(RuntimeError):
                self.orders.pop(account)

    @rule(account=st.integers(0, 2), size=st.integers(0, 30))
    def trim(self, account: int, size: int) -> None:
        account %= self.accounts
        self.orders.trim(account, size)
        again, new = self.lines[4 * account + AGAIN], self.lines[4 * account + NEW]
        while len(again) > max(1, size // 3):
            new.append(again.pop(0))
            assert self.orders.rank[new[-1]] == NEW

    @invariant()
    def agree(self) -> None:
        self.orders.check_integrity()
        assert [list(self.orders.line(line)) for line in range(len(self.lines))] == self.lines
        for account in range(self.accounts):
            slots = [slot for line in self.lines[4 * account : 4 * account + 4] for slot in line]
            assert list(self.orders.slots(account)) == slots
            assert self.orders.count(account) == len(slots)


TestOrders = OrdersMachine.TestCase
TestOrders.settings = settings(max_examples=60, stateful_step_count=40, derandomize=True, database=None, deadline=None)


class Pool:
    """A PageIndex that serves prefixes whole, one after another, as jobs do."""

    def __init__(self, capacity: int) -> None:
        self.index = PageIndex(capacity)
        self.free = list(range(capacity))

    def serve(self, keys: list[bytes]) -> int:
        """Return how many leading pages were resident."""
        index = self.index
        slots = [index.find(key) for key in keys]
        host = slots.index(-1) if -1 in slots else len(slots)
        index.hold([slot for slot in slots if slot >= 0], again=True)
        missing = sum(slot < 0 for slot in slots) - len(self.free)
        self.free += index.evict(max(0, missing))
        for page, key in enumerate(keys):
            if slots[page] < 0:
                slots[page] = self.free.pop()
                index.insert(slots[page], key, 1)
        index.release(slots[::-1])
        return host

    def line(self, rank: int) -> list[bytes | None]:
        return [self.index.key_of(slot) for slot in self.index._orders.line(rank)]


def test_what_was_wanted_again_outlives_what_was_not() -> None:
    pool = Pool(20)
    old, new = chain("a", 4), chain("b", 4)
    pool.serve(old)
    pool.serve(old)
    assert pool.line(AGAIN) == old[::-1]
    for number in range(10):
        pool.serve(chain(f"c{number}", 8))
    assert pool.serve(old) == 4
    assert pool.serve(new) == 0
    pool.index.check_integrity()


def test_a_third_of_the_slots_at_most_is_kept_for_that() -> None:
    pool = Pool(20)
    chains = [chain(name, 3) for name in "abcd"]
    for keys in chains + chains:
        pool.serve(keys)
    assert pool.line(AGAIN) == [*chains[2][::-1], *chains[3][::-1]]
    assert pool.line(NEW) == [*chains[0][::-1], *chains[1][::-1]]  # the oldest fell out, deepest page first


def test_an_ancestor_that_was_held_all_the_time_ranks_no_lower_than_what_it_leads_to() -> None:
    index = PageIndex(10)
    keys = chain("a", 4)
    for slot, key in enumerate(keys):
        index.insert(slot, key, 1)
    index.hold([0, 1])
    index.release([3, 2, 1, 0])
    index.hold([2, 3], again=True)
    index.hold([0, 1], again=True)
    index.release([3, 2, 1, 0])
    index.release([1, 0])
    assert [index.evict(1)[0] for _ in keys] == [3, 2, 1, 0]


def test_wanted_pages_go_last_whether_they_were_there_or_came_later() -> None:
    pool = Pool(12)
    near, far = chain("n", 3), chain("f", 3)
    pool.serve(near)
    pool.index.set_wanted([*reversed(far), *reversed(near)], True)
    pool.serve(far)
    for number in range(6):
        pool.serve(chain(f"c{number}", 6))
    assert pool.line(WANTED) == [*near[::-1], *far[::-1]]
    pool.index.set_wanted(near[::-1], False)
    pool.index.check_integrity()
    for number in range(6, 9):
        pool.serve(chain(f"c{number}", 6))
    assert [pool.index.find(key) >= 0 for key in near + far] == [False] * 3 + [True] * 3


def test_a_demoted_page_goes_first_until_it_is_held_again() -> None:
    pool = Pool(12)
    a, b = chain("a", 3), chain("b", 3)
    pool.serve(a)
    pool.serve(a)
    pool.serve(b)
    pool.index.demote([pool.index.find(key) for key in a])
    assert pool.line(PASSING) == a[::-1]
    slots = [pool.index.find(key) for key in a[:2]]
    pool.index.hold(slots)
    pool.index.release(slots[::-1])
    assert pool.line(PASSING) == a[2:]
    assert pool.line(NEW) == [*b[::-1], *a[1::-1]]
    pool.index.check_integrity()


def test_a_pool_too_small_for_what_comes_back_keeps_some_of_it_instead_of_none() -> None:
    """Forty conversations in turn in a pool for ten: least recently used would find none of their pages ever."""
    pool = Pool(240)
    chains = [chain(f"k{number:02}", 24) for number in range(40)]
    hits = []
    for turn in range(12):
        hits.append(sum(pool.serve(keys) for keys in chains))
        if turn > 1:
            assert pool.index._reuse[0].selective
    assert hits[1] == 0
    assert min(hits[-4:]) >= 72  # of 960, of which the best choice can find some 240
    pool.index.check_integrity()


def test_a_pool_large_enough_for_what_comes_back_keeps_every_new_page() -> None:
    pool = Pool(240)
    for turn in range(12):
        for number in range(8):
            assert pool.serve(chain(f"k{number:02}", 24)) == (24 if turn else 0)
        pool.serve(chain(f"once{turn}", 24))
        assert not pool.index._reuse[0].selective


def test_a_page_is_known_within_reach_and_not_beyond() -> None:
    seen = SeenPages(64)
    distances = ReuseDistances(seen)
    keys = [b"page%04d" % number for number in range(400)]
    looked_at = next(key for key in keys if distances.bring(key, 16) is not None)
    assert distances.bring(looked_at, 16) is True
    others = [b"other%05d" % number for number in range(20_000)]
    unlooked = [key for key in others if ReuseDistances(SeenPages(1)).bring(key, 16) is None][: REACH * 16 + 1]
    assert len(unlooked) == REACH * 16 + 1
    for key in unlooked:
        distances.bring(key, 16)
    assert distances.bring(looked_at, 16) is False


def test_accounts_do_not_know_each_others_pages() -> None:
    seen = SeenPages(1024)
    one, other = ReuseDistances(seen, 1), ReuseDistances(seen, 2)
    keys = [b"page%04d" % number for number in range(800)]
    for key in keys:
        one.bring(key, 2000)
    assert not any(other.bring(key, 2000) for key in keys)


class IndexMachine(RuleBasedStateMachine):
    """Ranks and lines against a plain model, with holders that hold prefixes of a tree from page 0 on."""

    @initialize(seed=st.integers(0, 1000))
    def build(self, seed: int) -> None:
        rng = random.Random(seed)
        self.chains = [chain("t", 8)]
        for number in range(3):
            self.chains.append(chain(f"b{number}", 8, rng.choice(self.chains)[: rng.randrange(8)]))
        self.index = PageIndex(24)
        self.free = list(range(24))
        self.holders: list[list[int]] = []
        self.wanted: list[bytes] = []

    @rule(number=st.integers(0, 3), length=st.integers(1, 8), again=st.booleans())
    def take(self, number: int, length: int, again: bool) -> None:
        keys, index = self.chains[number][:length], self.index
        found = {key: index.find(key) for key in keys}
        index.hold([slot for slot in found.values() if slot >= 0], again=again)
        missing = [key for key, slot in found.items() if slot < 0]
        if len(missing) > len(self.free) + index.evictable:
            index.release([slot for slot in reversed(found.values()) if slot >= 0])
            return
        self.free += index.evict(max(0, len(missing) - len(self.free)))
        for key in missing:
            found[key] = self.free.pop()
            index.insert(found[key], key, 1)
        self.holders.append(list(found.values()))

    @precondition(lambda self: self.holders)
    @rule(number=st.integers(0, 99))
    def release(self, number: int) -> None:
        self.index.release(reversed(self.holders.pop(number % len(self.holders))))
        assert len(list(self.index._orders.line(AGAIN))) <= 24 // 3

    @rule(number=st.integers(0, 3), length=st.integers(0, 8))
    def want(self, number: int, length: int) -> None:
        self.index.set_wanted(self.wanted, False)
        self.wanted = self.chains[number][:length][::-1]
        self.index.set_wanted(self.wanted, True)

    @precondition(lambda self: self.index.evictable)
    @rule(selective=st.booleans())
    def evict(self, selective: bool) -> None:
        """No ancestor goes before its descendants, and no wanted page before others."""
        index = self.index
        idle = [index.key_of(slot) for slot in index._orders.slots(0)]
        (slot,) = index.evict(1)
        self.free.append(slot)
        gone = idle[0]
        assert gone is not None
        assert index.find(gone) < 0
        below = {key for keys in self.chains if gone in keys for key in keys[keys.index(gone) + 1 :]}
        assert all(index.find(key) < 0 for key in below)
        assert gone not in self.wanted or set(idle) <= set(self.wanted)
        index._reuse[0].kept_new = 0.3 if selective else 1.0

    @invariant()
    def agree(self) -> None:
        self.index.check_integrity()


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=50, derandomize=True, database=None, deadline=None)
