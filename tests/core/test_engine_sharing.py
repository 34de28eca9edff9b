"""Jobs that want the same pages: read once, and nobody suffers from another's end."""

import pytest

from forestage.core.job import Job, JobState, Outcome, Reason
from support.engine_driver import EngineDriver, chain, kv_model

KEYS = chain("a", 8)


def _driver(slots: int = 16) -> EngineDriver:
    driver = EngineDriver(kv_model(), [slots])
    driver.store(KEYS)
    return driver


def _loading(driver: EngineDriver, number: int) -> list[Job]:
    jobs = [driver.submit(KEYS) for _ in range(number)]
    driver.answer_probes()
    assert all(job.state is JobState.LOADING for job in jobs)
    return jobs


def test_eight_identical_prefetches_read_each_page_once() -> None:
    driver = _driver()
    jobs = _loading(driver, 8)
    driver.run()
    assert [job.outcome for job in jobs] == [Outcome.COMPLETE] * 8
    assert sorted(driver.reads) == sorted((0, key) for key in KEYS)
    assert [job.count_pages() for job in jobs] == [(8, 0), *[(0, 8)] * 7]
    assert len({job.lease.slots for job in jobs if job.lease is not None}) == 1
    for job in jobs:
        driver.release(job)
    assert driver.pool.index[0].held == 0


@pytest.mark.parametrize("reason", [Reason.CANCELLED, Reason.FINISHED, Reason.DEADLINE])
@pytest.mark.parametrize(("handed_out", "ended"), [(0, 0), (8, 0), (8, 3), (4, 2)])
def test_the_first_leaves_and_the_others_complete(reason: Reason, handed_out: int, ended: int) -> None:
    driver = _driver()
    jobs = _loading(driver, 8)
    for _ in range(handed_out):
        driver.begin_reads()
    for load in driver.in_flight[:ended]:
        driver.end_read(load)
    driver.engine.stop(jobs[0], reason, driver.now)
    assert jobs[0].done
    assert jobs[0].ready == ended
    assert not any(load.read.stopped for load in driver.in_flight if load.read is not None)
    driver.run()
    assert [job.outcome for job in jobs[1:]] == [Outcome.COMPLETE] * 7
    assert len(driver.reads) == 8
    assert jobs[1].count_pages() == (8 - max(handed_out, ended), max(handed_out, ended))


def test_all_but_the_last_leave_one_after_another() -> None:
    driver = _driver()
    jobs = _loading(driver, 5)
    for job in jobs[:4]:
        driver.begin_reads()
        driver.end_read(driver.in_flight[0])
        driver.engine.stop(job, Reason.CANCELLED, driver.now)
        driver.check()
    driver.run()
    assert (jobs[4].outcome, len(driver.reads)) == (Outcome.COMPLETE, 8)


def test_the_budget_follows_the_reads_to_whoever_carries_on() -> None:
    driver = _driver()
    jobs = _loading(driver, 2)
    page = driver.layout.components[0].slot_bytes
    promised = driver.engine.admission.promised_to
    assert (promised(jobs[0]), promised(jobs[1])) == (8 * page, 0)
    driver.engine.stop(jobs[0], Reason.CANCELLED, driver.now)
    assert (promised(jobs[0]), promised(jobs[1])) == (0, 8 * page)
    driver.run()
    assert driver.engine.admission.promised == 0


def test_a_bad_page_ends_all_who_wait_for_it() -> None:
    driver = _driver()
    jobs = _loading(driver, 3)
    driver.failing[0, KEYS[4]] = Reason.CORRUPT
    driver.run()
    assert [(job.ready, job.shortfall) for job in jobs] == [(4, {Reason.CORRUPT: 4})] * 3
    assert driver.resident() == set(KEYS[:4])


def test_a_read_that_all_have_left_is_stopped_and_its_slot_comes_back_when_it_has_ended() -> None:
    driver = _driver(8)
    jobs = _loading(driver, 2)
    driver.begin_all_reads()
    for job in jobs:
        driver.engine.stop(job, Reason.CANCELLED, driver.now)
    flags = [load.read for load in driver.in_flight]
    assert all(flag is not None and flag.stopped for flag in flags)
    assert (driver.pool.slots[0].free, driver.pool.slots[0].filling) == (0, 8)
    for number, load in enumerate(tuple(driver.in_flight)):
        driver.end_read_as(load, None, untouched=number % 2 == 0)
    assert driver.pool.slots[0].free == 8
    assert driver.resident() == set()


def test_who_comes_before_a_stopped_read_has_ended_takes_it_over() -> None:
    driver = _driver(8)
    (first,) = _loading(driver, 1)
    driver.begin_all_reads()
    driver.engine.stop(first, Reason.CANCELLED, driver.now)
    (second,) = _loading(driver, 1)
    assert second.granted == 8
    assert not any(load.read.stopped for load in driver.in_flight if load.read is not None)
    for number, load in enumerate(tuple(driver.in_flight)):
        # Some had seen the stop already and were not begun; they are read anew.
        driver.end_read_as(load, None, untouched=number in {2, 5})
    assert not second.done
    driver.run()
    assert (second.outcome, second.count_pages()) == (Outcome.COMPLETE, (2, 6))
    assert len(driver.reads) == 10


def test_a_branch_joins_the_shared_pages_only() -> None:
    driver = _driver()
    branch = chain("b", 8, KEYS[:5])
    driver.store(branch)
    trunk_job, branch_job = driver.submit(KEYS), driver.submit(branch)
    driver.run()
    assert (trunk_job.outcome, branch_job.outcome) == (Outcome.COMPLETE, Outcome.COMPLETE)
    assert (trunk_job.count_pages(), branch_job.count_pages()) == ((8, 0), (3, 5))
    assert len(driver.reads) == 11


def test_a_stalled_read_fails_its_jobs_and_its_page_can_be_read_elsewhere() -> None:
    driver = _driver(8)
    jobs = _loading(driver, 2)
    driver.begin_all_reads()
    stuck = driver.flight(KEYS[2])
    for load in tuple(driver.in_flight):
        if load is not stuck:
            driver.end_read(load)
    driver.stall_read(stuck)
    assert [(job.ready, job.shortfall) for job in jobs] == [(2, {Reason.STORAGE_ERROR: 6})] * 2
    assert driver.pool.slots[0].filling == 1  # it stays in use until the storage has let go
    again = driver.prefetch(KEYS)
    assert (again.granted, again.ready) == (7, 7)
    assert stuck.slot not in (again.lease.slots[0] if again.lease else ())
    driver.end_read_as(stuck, None)  # it comes after all, and is not wanted any more
    driver.check()
    assert driver.pool.slots[0].free == 1
    assert driver.shown(again) == [KEYS[:7]]


def test_a_job_and_its_follower_with_device_pages_in_between() -> None:
    driver = _driver()
    first, second = driver.submit(KEYS, device_pages=5), driver.submit(KEYS, device_pages=2)
    driver.run()
    assert (first.ready, second.ready, len(driver.reads)) == (8, 8, 6)
    assert driver.shown(second) == [KEYS[2:]]


def test_keys_at_another_place_do_no_harm() -> None:
    """Keys should be chains; a client that sends them otherwise may fool itself, but nobody else."""
    driver = _driver()
    proper, odd = driver.submit(KEYS), driver.submit(KEYS[5:1:-1])
    driver.run()
    assert (proper.outcome, odd.outcome) == (Outcome.COMPLETE, Outcome.COMPLETE)
    assert driver.shown(odd) == [KEYS[5:1:-1]]
    driver = _driver()
    driver.failing[0, KEYS[3]] = Reason.CORRUPT
    odd, proper = driver.submit(KEYS[5:1:-1]), driver.submit(KEYS)
    driver.run()
    assert (proper.ready, odd.ready) == (3, 2)
    driver.check()
