"""PageIndex: what is evicted in which order, and what holds are worth."""

import random

import pytest

from forestage.core.index import PageIndex
from support.engine_driver import EngineDriver, chain, kv_model


def _insert(index: PageIndex, keys: list[bytes], first_slot: int = 0) -> list[int]:
    slots = list(range(first_slot, first_slot + len(keys)))
    for slot, key in zip(slots, keys, strict=True):
        index.insert(slot, key, 1)
    return slots


def _evict_all(index: PageIndex) -> list[bytes]:
    order = []
    while index.evictable:
        key = {index.key_of(slot): slot for slot in range(64) if index.key_of(slot) is not None}
        slot = index.evict(1)[0]
        order.append(next(name for name, at in key.items() if at == slot and name is not None))
    return order


def test_the_deepest_page_of_a_chain_goes_first() -> None:
    index = PageIndex(64)
    keys = chain("a", 5)
    index.release(reversed(_insert(index, keys)))
    assert _evict_all(index) == keys[::-1]
    assert index.evicted == 5


def test_the_least_recently_used_chain_goes_first() -> None:
    index = PageIndex(64)
    old, new = chain("a", 4), chain("b", 4)
    old_slots, new_slots = _insert(index, old), _insert(index, new, 10)
    index.release(reversed(new_slots))
    index.release(reversed(old_slots))
    index.hold(new_slots)
    index.release(reversed(new_slots))
    assert _evict_all(index) == old[::-1] + new[::-1]


def test_a_shared_beginning_outlives_both_branches() -> None:
    index = PageIndex(64)
    trunk = chain("t", 6)
    branch = chain("b", 6, trunk[:3])
    slots = _insert(index, trunk)
    index.release(reversed(slots))
    branch_slots = slots[:3]
    index.hold(branch_slots)
    branch_slots = branch_slots + _insert(index, branch[3:], 10)
    index.release(reversed(branch_slots))
    assert _evict_all(index) == trunk[:2:-1] + branch[::-1]


def test_held_pages_are_not_evicted() -> None:
    index = PageIndex(64)
    keys = chain("a", 4)
    slots = _insert(index, keys)
    index.hold(slots[:2])
    index.release(reversed(slots))
    assert (index.held, index.evictable) == (2, 2)
    assert _evict_all(index) == keys[:1:-1]
    assert [index.find(key) for key in keys] == [0, 1, -1, -1]
    index.check_integrity()


def test_misuse_is_refused() -> None:
    index = PageIndex(4)
    index.insert(0, b"a", 1)
    with pytest.raises(RuntimeError):
        index.insert(0, b"b", 1)
    with pytest.raises(RuntimeError):
        index.insert(1, b"a", 1)
    index.release([0])
    with pytest.raises(RuntimeError):
        index.release([0])
    index.check_integrity()


def test_a_page_counts_as_used_once_and_as_unused_when_it_goes_unseen() -> None:
    index = PageIndex(8)
    slots = _insert(index, chain("a", 4))
    index.mark_used(slots[:2])
    index.mark_used(slots[:2])
    index.release(reversed(slots))
    while index.evictable:
        index.evict(1)
    assert (index.used, index.unused) == (2, 2)


def test_no_ancestor_is_evicted_before_its_descendants() -> None:
    """Random prefixes of a random tree, each held from page 0 on, and evictions in between."""
    for seed in range(40):
        rng = random.Random(seed)
        chains = [chain("t", 12)]
        for number in range(4):
            parent = rng.choice(chains)
            chains.append(chain(f"b{number}", 12, parent[: rng.randrange(12)]))
        parents = {child: keys[:i] for keys in chains for i, child in enumerate(keys)}
        index = PageIndex(64)
        free = list(range(64))
        holders: list[list[int]] = []
        for _ in range(300):
            if rng.random() < 0.5:
                slots = []
                for key in rng.choice(chains)[: rng.randint(1, 12)]:
                    slot = index.find(key)
                    if slot < 0:
                        slot = free.pop()
                        index.insert(slot, key, 1)
                    else:
                        index.hold([slot])
                    slots.append(slot)
                holders.append(slots)
            elif holders and rng.random() < 0.7:
                index.release(reversed(holders.pop(rng.randrange(len(holders)))))
            elif index.evictable:
                names = {slot: index.key_of(slot) for slot in range(64)}
                evicted = index.evict(1)[0]
                free.append(evicted)
                gone = names[evicted]
                assert not any(
                    key is not None and gone in parents[key] and index.find(key) >= 0 for key in names.values()
                )
            index.check_integrity()


def test_jobs_and_leases_keep_that_order() -> None:
    """Prefixes that overlap are loaded, leased and released in all orders; what goes first is never an ancestor."""
    for seed in range(30):
        rng = random.Random(seed)
        driver = EngineDriver(kv_model(), [30])
        trunk = chain("t", 10)
        chains = [trunk, chain("b", 10, trunk[:4]), chain("c", 10, trunk[:7])]
        for keys in chains:
            driver.store(keys)
        leased = []
        for _ in range(12):
            leased.append(driver.prefetch(rng.choice(chains)[: rng.randint(1, 10)]))
            if len(leased) > 2:
                driver.release(leased.pop(rng.randrange(len(leased))))
        for job in leased:
            driver.release(job)
        seen: list[bytes] = []
        while driver.pool.index[0].evictable:
            slot = driver.pool.index[0].evict(1)[0]
            key = driver.logs[0].visible[slot]
            assert key is not None
            driver.logs[0].clear(slot)
            driver.pool.slots[0].give_back(slot)
            seen.append(key)
        for keys in chains:
            assert [key for key in seen if key in keys] == [key for key in keys[::-1] if key in seen]
