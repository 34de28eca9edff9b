"""The engine with pages that were there before it: laws, hits, the order in which they go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.engine_driver import EngineDriver, chain, kv_model


def adopted(capacity: int, pages: list[tuple[int, bytes]]) -> EngineDriver:
    """An engine that starts with pages in slots."""
    driver = EngineDriver(kv_model(), [capacity])
    for slot, key in pages:
        driver.logs[0].visible[slot] = key
    driver.pool.adopt(0, pages)
    driver.check()
    return driver


def test_adopted_pages_are_hits_and_neither_used_nor_unused() -> None:
    keys = chain("a", 6)
    driver = adopted(8, [(slot, keys[page]) for page, slot in ((2, 0), (1, 7), (0, 3))])
    driver.store(keys)
    job = driver.prefetch(keys)
    assert (job.host, job.ready, driver.reads) == (3, 6, [(0, key) for key in keys[3:]])
    assert driver.shown(job) == [keys]
    assert [driver.pool.index[0].find(key) for key in keys[:3]] == [3, 7, 0]
    driver.release(job)
    assert driver.pool.index[0].used == 3  # those that were read
    others = chain("b", 8)
    driver.store(others)
    driver.release(driver.prefetch(others))
    assert driver.resident() == set(others)
    assert driver.pool.index[0].unused == 0


def test_adopted_pages_are_evicted_in_the_order_given_and_before_all_others() -> None:
    old = chain("old", 4)
    driver = adopted(6, [(slot, old[page]) for slot, page in enumerate((3, 2, 1, 0))])
    new = chain("new", 6)
    driver.store(new)
    for length, left in ((2, 4), (3, 3), (4, 2), (6, 0)):
        driver.release(driver.prefetch(new[:length]))
        assert driver.resident() == {*new[:length], *old[:left]}
        assert driver.pool.index[0].evicted == 4 - left
    assert driver.pool.index[0].unused == 0


def test_a_slot_or_key_cannot_be_adopted_twice() -> None:
    first, second = chain("a", 2)
    driver = adopted(4, [(1, first)])
    with pytest.raises(RuntimeError, match="not FREE"):
        driver.pool.adopt(0, [(1, second)])
    with pytest.raises(RuntimeError, match="resident already"):
        driver.pool.adopt(0, [(2, first)])


@given(st.sets(st.integers(0, 11)), st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), max_size=6))
def test_every_slot_can_be_had_whatever_was_adopted(slots: set[int], prefixes: list[tuple[int, int]]) -> None:
    chains = [chain(name, 12) for name in "abc"]
    # Any pages in any slots: gaps, and pages of chains that nobody asks for again.
    driver = adopted(12, [(slot, chains[slot % 3][slot]) for slot in sorted(slots, reverse=True)])
    for keys in chains:
        driver.store(keys)
    for number, length in prefixes:
        job = driver.prefetch(chains[number][:length])
        assert job.ready == length
        driver.release(job)
    job = driver.prefetch(chains[0])
    assert job.ready == 12
    driver.release(job)
    driver.advance(1000)
    driver.check_idle()
