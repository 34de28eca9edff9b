"""Hybrid jobs that are cut short: they settle at the best boundary that their pages allow, in the time there is."""

import pytest

from forestage.core.engine import EngineSettings
from forestage.core.job import JobState, Outcome, Reason
from support.engine_driver import EngineDriver, ReadFlag, chain, kv_model

KEYS = chain("a", 8)
SETTLE = 0.02


def _hybrid_driver(states: list[int], tail_slots: int, *, kv_slots: int = 8, window: int = 1) -> EngineDriver:
    driver = EngineDriver(kv_model(windows=[window]), [kv_slots, tail_slots], EngineSettings(1 << 40, settle_s=SETTLE))
    driver.store(KEYS)
    driver.stored.update((1, KEYS[page]) for state in states for page in range(max(0, state - window), state))
    return driver


def test_a_tail_state_that_hangs_behind_all_pages_leaves_the_boundary_before() -> None:
    driver = _hybrid_driver([4, 8], tail_slots=2)
    job = driver.submit(KEYS, deadline_ms=500)
    driver.answer_probes()
    driver.begin_all_reads()
    for key in KEYS:
        driver.end_read(driver.flight(key))
    assert (job.contiguous, job.ready) == (8, 0)
    driver.advance(0.5 - SETTLE)
    assert not job.done
    assert driver.begin_reads()  # the state of the lower boundary
    driver.end_read(driver.flight(KEYS[3], 1))
    assert not job.done  # the better one may still come
    driver.advance(SETTLE)
    assert (job.done, job.ready, job.shortfall) == (True, 4, {Reason.DEADLINE: 4})
    assert driver.shown(job) == [KEYS[:4], KEYS[3:4]]
    driver.end_read(driver.in_flight[0])
    assert driver.pool.slots[1].free == 1


def test_a_tail_state_that_comes_while_settling_ends_the_job_whatever_else_was_asked_for() -> None:
    driver = _hybrid_driver([4, 8], tail_slots=2)
    job = driver.submit(KEYS)
    driver.answer_probes()
    driver.begin_all_reads()
    for key in KEYS:
        driver.end_read(driver.flight(key))
    driver.engine.stop(job, Reason.FINISHED, driver.now)
    driver.begin_all_reads()
    driver.end_read(driver.flight(KEYS[7], 1))
    assert (job.done, job.ready, job.outcome, job.shortfall) == (True, 8, Outcome.COMPLETE, {})
    assert [load.key for load in driver.in_flight] == [KEYS[3]]


def test_a_read_that_is_still_wanted_after_a_cut_is_not_stopped_for_a_moment() -> None:
    """A reader that looked just then would give up the very state that the job waits for."""
    driver = _hybrid_driver([4, 8], tail_slots=2)
    job = driver.submit(KEYS)
    driver.answer_probes()
    driver.begin_all_reads()
    for key in KEYS:
        driver.end_read(driver.flight(key))
    driver.engine.stop(job, Reason.FINISHED, driver.now)
    flag = driver.flight(KEYS[7], 1).read
    assert isinstance(flag, ReadFlag)
    assert flag.stops == 0
    other = driver.submit(KEYS[:7])
    driver.answer_probes()
    driver.begin_all_reads()
    driver.engine.stop(job, Reason.CANCELLED, driver.now)
    assert (flag.stops, other.granted) == (1, 4)


def test_a_deadline_ends_the_settling_too() -> None:
    driver = _hybrid_driver([4, 8], tail_slots=2)
    job = driver.submit(KEYS, deadline_ms=500)
    driver.answer_probes()
    driver.begin_all_reads()
    for key in KEYS[:6]:
        driver.end_read(driver.flight(key))
    driver.advance(0.5 - SETTLE)
    assert (job.done, job.state) == (False, JobState.LOADING)
    driver.advance(SETTLE)
    assert (job.done, job.ready, job.shortfall) == (True, 0, {Reason.DEADLINE: 8})


@pytest.mark.parametrize("deadline_ms", [1, 10, 20, 30])
def test_settling_after_a_gap_ends_at_the_deadline_however_short_it_is(deadline_ms: int) -> None:
    driver = _hybrid_driver([4, 8], tail_slots=2)
    job = driver.submit(KEYS, deadline_ms=deadline_ms)
    driver.answer_probes()
    driver.begin_all_reads()
    for key in KEYS[:6]:
        driver.end_read(driver.flight(key))
    driver.advance(deadline_ms / 1e3 * 0.45)
    driver.end_read_as(driver.flight(KEYS[6]), Reason.VANISHED)
    assert job.state is JobState.LOADING  # the state at 4 is on its way
    driver.advance(deadline_ms / 1e3 * 0.55)
    assert job.done
    assert driver.now <= (job.deadline or 0.0)


@pytest.mark.parametrize("stop", ["gap", "finish"])
@pytest.mark.parametrize("tail_slots", [1, 2])
@pytest.mark.parametrize("tail_begun", [False, True])
def test_a_job_cut_short_settles_at_the_boundary_below(stop: str, tail_slots: int, tail_begun: bool) -> None:
    """Even if the pool has one tail slot, and a read that the job gave up is still going on in it."""
    driver = _hybrid_driver([4, 8], tail_slots)
    job = driver.submit(KEYS)
    driver.answer_probes()
    while (9 if tail_begun else 7) > len(driver.in_flight):
        driver.begin_reads()
    for key in KEYS[:6]:
        driver.end_read(driver.flight(key))
    if stop == "gap":
        driver.end_read_as(driver.flight(KEYS[6]), Reason.VANISHED)
    else:
        driver.engine.stop(job, Reason.FINISHED, driver.now)
    assert not job.done
    driver.run()
    assert (job.done, job.ready, job.outcome) == (True, 4, Outcome.PARTIAL)
    assert job.shortfall == {Reason.VANISHED if stop == "gap" else Reason.FINISHED: 4}
    assert driver.shown(job) == [KEYS[:4], KEYS[3:4]]
    assert driver.resident() == set(KEYS[:6])  # loaded, and good for the next one


def test_waiting_for_an_own_slot_ends_with_the_settling() -> None:
    driver = _hybrid_driver([4, 8], tail_slots=1)
    job = driver.submit(KEYS)
    driver.answer_probes()
    driver.begin_all_reads()
    for key in KEYS:
        driver.end_read(driver.flight(key))
    driver.engine.stop(job, Reason.FINISHED, driver.now)
    assert not job.done
    driver.check()
    driver.advance(SETTLE)
    assert (job.done, job.ready) == (True, 0)
    driver.end_read(driver.in_flight[0])
    driver.check()
    assert driver.pool.slots[1].free == 1


def test_a_given_up_state_that_stalls_ends_the_waiting() -> None:
    driver = _hybrid_driver([4, 8], tail_slots=1)
    job = driver.submit(KEYS)
    driver.answer_probes()
    driver.begin_all_reads()
    for key in KEYS:
        driver.end_read(driver.flight(key))
    driver.engine.stop(job, Reason.FINISHED, driver.now)
    driver.stall_read(driver.in_flight[0])
    assert (job.done, job.ready) == (True, 0)
    driver.check()


def test_a_given_up_state_that_somebody_else_took_over_ends_the_waiting() -> None:
    driver = _hybrid_driver([4, 8], tail_slots=1)
    job = driver.submit(KEYS)
    driver.answer_probes()
    driver.begin_all_reads()
    for key in KEYS:
        driver.end_read(driver.flight(key))
    driver.engine.stop(job, Reason.FINISHED, driver.now)
    other = driver.submit(KEYS)
    driver.answer_probes()
    assert (other.state, other.granted) == (JobState.LOADING, 8)
    driver.run()
    assert (job.done, other.ready) == (True, 8)


def test_settling_ends_after_its_time() -> None:
    driver = _hybrid_driver([4, 8], tail_slots=2)
    job = driver.submit(KEYS)
    driver.answer_probes()
    driver.begin_all_reads()
    for key in KEYS[:6]:
        driver.end_read(driver.flight(key))
    driver.engine.stop(job, Reason.FINISHED, driver.now)
    driver.begin_all_reads()
    driver.advance(SETTLE / 2)
    driver.engine.stop(job, Reason.FINISHED, driver.now)  # once more: no more time
    assert not job.done
    driver.advance(SETTLE / 2)
    assert (job.done, job.ready) == (True, 0)
    assert driver.resident() == set(KEYS[:6])


def test_the_last_read_of_a_settling_job_does_not_wait_its_turn() -> None:
    driver = _hybrid_driver([4, 8], tail_slots=4, kv_slots=32)
    job = driver.submit(KEYS, priority=-5)
    driver.answer_probes()
    for _ in range(6):
        driver.begin_reads()
        driver.end_read(driver.in_flight[0])
    driver.store(chain("other", 20), [(1, [20])])
    driver.submit(chain("other", 20), priority=5)
    driver.answer_probes()
    driver.engine.stop(job, Reason.FINISHED, driver.now)
    driver.begin_reads()
    assert driver.reads[-1] == (1, KEYS[3])


def test_a_gap_does_not_put_a_job_before_the_others() -> None:
    """Only the last read of a settling job goes first, not all that it still waits for."""
    driver = _hybrid_driver([8], tail_slots=4, kv_slots=64)
    long = chain("long", 40)
    driver.store(long, [(1, [30, 40])])
    job = driver.submit(long)
    driver.answer_probes()
    driver.begin_reads()
    other = driver.submit(KEYS)
    driver.answer_probes()
    driver.engine.read_ended("m", driver.in_flight.pop(), None, driver.now)
    driver.begin_reads()
    state = next(load for load in job.pending[1].values())
    driver.pool.begin(state)  # out of order, as if several batches were in flight
    driver.in_flight.append(state)
    driver.end_read_as(state, Reason.VANISHED)
    driver.reads.clear()
    for _ in range(10):
        driver.begin_reads()
    assert {driver.reads[number][1] in KEYS for number in range(10)} == {True, False}
    driver.run()
    assert (job.ready, other.ready) == (30, 8)


def test_one_load_is_not_handed_out_twice_after_two_cuts() -> None:
    driver = EngineDriver(kv_model(windows=[1]), [5, 1])
    keys = chain("a", 3)
    driver.store(keys)
    driver.stored.update((1, key) for key in keys)
    one, two = driver.submit(keys), driver.submit(keys)
    driver.answer_probes()
    for _ in range(4):
        driver.begin_reads()
    driver.end_read_as(driver.flight(keys[1]), Reason.VANISHED)
    driver.run()
    assert (one.ready, two.ready) == (1, 1)


def test_a_state_that_fails_leaves_the_boundary_below() -> None:
    driver = _hybrid_driver([2, 5, 8], tail_slots=1)
    driver.failing = {(1, KEYS[7]): Reason.CORRUPT, (1, KEYS[4]): Reason.VANISHED}
    job = driver.prefetch(KEYS)
    assert (job.ready, job.granted, job.shortfall) == (2, 8, {Reason.CORRUPT: 6})
    assert driver.shown(job) == [KEYS[:2], KEYS[1:2]]


def test_no_boundary_below_leaves_nothing_but_loaded_pages() -> None:
    driver = _hybrid_driver([8], tail_slots=2)
    driver.failing[1, KEYS[7]] = Reason.STORAGE_ERROR
    job = driver.prefetch(KEYS)
    assert (job.ready, job.outcome, job.shortfall) == (0, Outcome.MISS, {Reason.STORAGE_ERROR: 8})
    assert driver.resident() == set(KEYS)


def test_what_was_usable_stays_usable_whatever_fails() -> None:
    driver = _hybrid_driver([4, 8], tail_slots=2)
    driver.release(driver.prefetch(KEYS[:4]))
    driver.failing[0, KEYS[5]] = Reason.CORRUPT
    job = driver.submit(KEYS)
    driver.answer_probes()
    assert job.ready == 4
    driver.stored = {place for place in driver.stored if place[0] == 0}  # no other way back
    driver.run()
    assert (job.ready, job.shortfall) == (4, {Reason.CORRUPT: 4})


def test_what_was_usable_is_kept_beside_a_window_that_overlaps_it() -> None:
    """Two windows of three states fit into four slots, as they share two."""
    driver = _hybrid_driver([4, 5], tail_slots=4, window=3)
    driver.release(driver.prefetch(KEYS[:4]))
    driver.failing[0, KEYS[4]] = Reason.VANISHED
    job = driver.submit(KEYS[:5])
    driver.answer_probes()
    assert (job.granted, job.ready) == (5, 4)
    driver.run()
    assert driver.shown(job) == [KEYS[:4], KEYS[1:4]]


def test_a_tail_state_behind_a_cut_does_not_stay() -> None:
    """It came before its page failed to; without that page nothing leads to it."""
    driver = EngineDriver(kv_model(windows=[1, 1]), [4, 1, 1])
    keys = chain("a", 3)
    driver.store(keys, [(1, [3]), (2, [3])])
    job = driver.submit(keys)
    driver.answer_probes()
    driver.begin_all_reads()
    for load in (driver.flight(keys[0]), driver.flight(keys[1]), driver.flight(keys[2], 1)):
        driver.end_read(load)
    driver.end_read_as(driver.flight(keys[2], 2), Reason.VANISHED)
    driver.run()
    assert (job.ready, job.contiguous) == (0, 2)
    assert driver.resident(1) == driver.resident(2) == set()


def test_a_job_that_could_aim_higher_again_takes_no_slots_that_it_gave_up() -> None:
    """Cut twice, with more room for tail states the second time: the pages in between belong to others by then."""
    driver = EngineDriver(kv_model(windows=[1]), [11, 3])
    keys, foreign, thief = chain("a", 10), chain("x", 1), chain("thief", 6)
    driver.store(keys, [(1, [4, 8, 10])])
    driver.store(foreign, [(1, [1])])
    driver.store(thief, [(1, [6])])
    leased = driver.prefetch(foreign)
    submitted = [driver.submit(keys[:4]), driver.submit(keys), driver.submit(keys)]
    driver.answer_probes()
    short, job, follower = submitted
    assert (job.granted, driver.pool.room(1)) == (10, 0)
    while keys[9] not in [load.key for load in driver.in_flight]:
        driver.begin_reads()
    driver.end_read_as(driver.flight(keys[9]), Reason.VANISHED)
    # The state at 8 finds no slot, so the job aims at 4, whose state another one reads; the follower carries on.
    assert [sorted(pages) for pages in job.pending] == [[0, 1, 2, 3], [3]]
    assert sorted(follower.pending[0]) == list(range(8))
    driver.engine.stop(follower, Reason.CANCELLED, driver.now)
    for load in tuple(driver.in_flight):
        if load.key in keys[4:]:
            driver.end_read_as(load, None, untouched=True)
    other = driver.submit(thief)
    driver.answer_probes()
    assert other.granted == 6
    driver.release(leased)
    assert (driver.pool.room(0), driver.pool.room(1)) == (1, 1)
    driver.end_read_as(driver.flight(keys[3], 1), Reason.VANISHED)
    driver.check()
    assert (short.done, job.done, job.ready) == (True, True, 0)
    assert job.shortfall == {Reason.VANISHED: 10}
