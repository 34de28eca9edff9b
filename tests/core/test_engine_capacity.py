"""Prefetches against pools that are just large enough, too small, full, leased or busy."""

import pytest

from forestage.core.engine import EngineSettings
from forestage.core.errors import CapacityError
from forestage.core.job import Job, JobState, Lengths, Outcome, Reason
from support.engine_driver import EngineDriver, chain, kv_model

KV = kv_model()
PAGE = KV.components[0].slot_bytes


def _driver(slots: int, *chains: list[bytes]) -> EngineDriver:
    driver = EngineDriver(KV, [slots])
    for keys in chains:
        driver.store(keys)
    return driver


def test_a_pool_of_256_gives_256() -> None:
    driver = _driver(256, chain("a", 256))
    job = driver.prefetch(chain("a", 256))
    assert (job.lengths(), job.outcome) == (Lengths(256, 0, 256, 256, 256, 256), Outcome.COMPLETE)
    assert (job.shortfall, job.count_pages()) == ({}, (256, 0))
    assert driver.shown(job) == [chain("a", 256)]


def test_a_pool_of_256_gives_256_of_257_and_says_so() -> None:
    driver = _driver(256, chain("a", 257))
    job = driver.prefetch(chain("a", 257))
    assert (job.lengths(), job.outcome) == (Lengths(257, 0, 257, 257, 256, 256), Outcome.PARTIAL)
    assert job.shortfall == {Reason.HOST_CAPACITY: 1}


@pytest.mark.parametrize("pages", [1, 2, 127, 128, 129, 255, 256])
def test_a_pool_full_of_unleased_pages_grants_all_that_it_can_hold(pages: int) -> None:
    driver = _driver(256, chain("old", 256), chain("new", 256))
    driver.release(driver.prefetch(chain("old", 256)))
    job = driver.prefetch(chain("new", 256)[:pages])
    assert (job.ready, job.outcome) == (pages, Outcome.COMPLETE)
    assert driver.resident() == {*chain("old", 256 - pages), *chain("new", pages)}  # its deepest pages went first
    assert driver.pool.index[0].evicted == pages


def test_six_of_twelve_pages_resident_in_a_pool_of_eight() -> None:
    """No page of the job's own prefix is evicted, none is read and then given up."""
    keys = chain("a", 12)
    driver = _driver(8, keys)
    driver.release(driver.prefetch(keys[:6]))
    driver.reads.clear()
    job = driver.prefetch(keys)
    assert job.lengths() == Lengths(12, 6, 12, 12, 8, 8)
    assert (job.shortfall, job.count_pages()) == ({Reason.HOST_CAPACITY: 4}, (2, 0))
    assert [key for _, key in driver.reads] == keys[6:8]
    assert driver.resident() == set(keys[:8])


def test_resident_pages_behind_a_gap_are_not_read_again_and_not_evicted() -> None:
    keys = chain("a", 8)
    driver = _driver(8, keys)
    driver.release(driver.prefetch(keys))
    driver.lose(keys[2])
    driver.lose(keys[3])
    driver.reads.clear()
    job = driver.prefetch(keys)
    assert job.lengths() == Lengths(8, 2, 8, 8, 8, 8)
    assert [key for _, key in driver.reads] == keys[2:4]


def test_ten_stored_six_free_the_rest_leased() -> None:
    driver = _driver(16, chain("held", 10), chain("a", 10))
    driver.prefetch(chain("held", 10))
    job = driver.prefetch(chain("a", 10))
    assert job.lengths() == Lengths(10, 0, 10, 10, 6, 6)
    assert job.shortfall == {Reason.HOST_CAPACITY: 4}


def test_ten_stored_nothing_free_is_a_miss_at_once() -> None:
    driver = _driver(10, chain("held", 10), chain("a", 10))
    held = driver.prefetch(chain("held", 10))
    job = driver.submit(chain("a", 10))
    driver.answer_probes()
    assert job.done
    assert (job.lengths(), job.outcome) == (Lengths(10, 0, 10, 10, 0, 0), Outcome.MISS)
    assert (job.shortfall, job.lease) == ({Reason.HOST_CAPACITY: 10}, None)
    assert driver.shown(held) == [chain("held", 10)]


def test_four_of_ten_stored_evict_nothing() -> None:
    driver = _driver(16, chain("idle", 10), chain("a", 4))
    driver.release(driver.prefetch(chain("idle", 10)))
    job = driver.prefetch(chain("a", 10))
    assert job.lengths() == Lengths(10, 0, 4, 4, 4, 4)
    assert job.shortfall == {Reason.NOT_STORED: 6}
    assert driver.pool.index[0].evicted == 0
    assert driver.resident() == {*chain("idle", 10), *chain("a", 4)}


def test_a_hundred_absent_prefixes_evict_nothing() -> None:
    driver = _driver(8, chain("idle", 8))
    driver.release(driver.prefetch(chain("idle", 8)))
    for number in range(100):
        job = driver.prefetch(chain(f"absent{number}", 8))
        assert (job.outcome, job.shortfall) == (Outcome.MISS, {Reason.NOT_STORED: 8})
    assert driver.resident() == set(chain("idle", 8))


def test_slots_are_reserved_for_the_whole_grant_before_the_first_read() -> None:
    """Two jobs that each want most of the pool: one gets all it wants, the other all that is left, nobody waits."""
    driver = _driver(10, chain("a", 8), chain("b", 8))
    first, second = driver.submit(chain("a", 8)), driver.submit(chain("b", 8))
    driver.answer_probes()
    assert (first.granted, second.granted) == (8, 2)
    assert driver.pool.slots[0].reserved == 10
    driver.run()
    assert (first.ready, second.ready, second.shortfall) == (8, 2, {Reason.HOST_CAPACITY: 6})


def test_slots_of_a_read_under_way_are_not_granted_before_it_has_ended() -> None:
    driver = _driver(4, chain("a", 4), chain("b", 4))
    first = driver.submit(chain("a", 4))
    driver.answer_probes()
    driver.begin_all_reads()
    driver.engine.stop(first, Reason.CANCELLED, driver.now)
    busy = driver.submit(chain("b", 4))
    driver.answer_probes()
    assert (busy.done, busy.shortfall) == (True, {Reason.HOST_CAPACITY: 4})
    for load in tuple(driver.in_flight):
        driver.end_read(load)
    assert driver.resident() == set()
    assert driver.prefetch(chain("b", 4)).outcome is Outcome.COMPLETE


def test_fifteen_clients_with_more_than_the_pool_holds() -> None:
    """Everybody is answered, leased pages never exceed the pool, each short answer says why."""
    chains = [chain(f"c{number}", 38) for number in range(15)]
    driver = _driver(64, *chains)
    for _ in range(20):
        jobs = [driver.submit(keys, lease_ms=1000) for keys in chains]
        driver.run()
        assert all(job.done for job in jobs)
        leased = sum(job.ready for job in jobs)
        assert leased == 64
        for job in jobs:
            assert job.shortfall == ({Reason.HOST_CAPACITY: 38 - job.ready} if job.ready < 38 else {})
        driver.advance(1.0)
        assert len(driver.engine.leases) == 0
    assert driver.prefetch(chains[0]).outcome is Outcome.COMPLETE


def test_the_whole_pool_for_each_of_fifteen() -> None:
    chains = [chain(f"c{number}", 64) for number in range(15)]
    driver = _driver(64, *chains)
    jobs = [driver.submit(keys) for keys in chains]
    driver.run()
    assert sorted(job.ready for job in jobs) == [0] * 14 + [64]


def _started(driver: EngineDriver, jobs: list[Job]) -> list[bool]:
    return [job.state is not JobState.QUEUED for job in jobs]


def test_no_more_than_the_budget_is_under_way_at_once() -> None:
    chains = [chain(f"c{number}", 4) for number in range(5)]
    driver = EngineDriver(KV, [64], EngineSettings(budget_bytes=8 * PAGE, queue_limit=3))
    for keys in chains:
        driver.store(keys)
    jobs = [driver.submit(keys) for keys in chains]
    assert _started(driver, jobs) == [True, True, False, False, False]
    with pytest.raises(CapacityError) as refused:
        driver.submit(chain("more", 4))
    assert refused.value.retry_after_s is not None
    assert len(driver.engine.jobs) == 5
    driver.answer_probes()
    driver.engine.stop(jobs[0], Reason.CANCELLED, driver.now)
    assert _started(driver, jobs) == [True, True, True, False, False]
    driver.run()
    assert [job.outcome for job in jobs] == [Outcome.CANCELLED, *[Outcome.COMPLETE] * 4]
    assert driver.engine.admission.promised == 0


def test_a_short_grant_makes_room_for_the_next_job_at_once() -> None:
    """What was promised at the start is replaced by what the grant really needs."""
    driver = EngineDriver(KV, [64], EngineSettings(budget_bytes=8 * PAGE))
    driver.store(chain("a", 1))
    driver.store(chain("b", 4))
    first, second = driver.submit(chain("a", 8)), driver.submit(chain("b", 4))
    assert second.state is JobState.QUEUED
    engine_probe = driver.engine.probes.popleft()
    driver.engine.probe_answered(engine_probe, driver.masks(engine_probe), driver.now)
    assert (first.granted, second.state) == (1, JobState.PROBING)


def test_only_the_share_that_may_be_pinned_is_pinned() -> None:
    """Even when all of it is resident: the rest of the pool must stay evictable."""
    keys = chain("a", 8)
    driver = EngineDriver(KV, [8], pinned_fraction=0.5)
    driver.store(keys)
    driver.store(chain("b", 8))
    for first in range(0, 8, 4):
        driver.release(driver.prefetch(keys[: first + 4], device_pages=first))
    assert driver.resident() == set(keys)
    job = driver.submit(keys)
    assert (job.host, driver.pool.index[0].held) == (8, 4)
    driver.run()
    assert (job.lengths(), job.shortfall) == (Lengths(8, 8, 8, 8, 4, 4), {Reason.HOST_CAPACITY: 4})
    driver.check()
    other = driver.prefetch(chain("b", 8))
    assert (other.granted, other.shortfall) == (0, {Reason.HOST_CAPACITY: 8})


def test_a_resident_page_that_could_not_be_pinned_and_was_evicted_is_read_again() -> None:
    keys = chain("a", 6)
    driver = EngineDriver(KV, [8], pinned_fraction=0.5)
    driver.store(keys)
    driver.release(driver.prefetch(keys[:4]))
    driver.release(driver.prefetch(keys, device_pages=4))
    job = driver.submit([*keys, *chain("unknown", 1)])
    assert (job.host, job.contiguous) == (6, 4)
    masks = driver.masks(driver.engine.probes.popleft())
    driver.lose(keys[5])
    driver.engine.probe_answered(job, masks, driver.now)
    assert job.lengths() == Lengths(7, 5, 6, 6, 4, 4)


def test_host_pages_are_held_from_the_start() -> None:
    driver = _driver(8, chain("a", 8), chain("b", 8))
    driver.release(driver.prefetch(chain("a", 8)[:6]))
    job = driver.submit(chain("a", 8))
    assert job.host == 6
    other = driver.submit(chain("b", 8))
    probes = [driver.engine.probes.popleft() for _ in range(2)]
    for asked in reversed(probes):
        driver.engine.probe_answered(asked, driver.masks(asked), driver.now)
    driver.run()
    assert (other.granted, job.granted, job.ready) == (2, 6, 6)
