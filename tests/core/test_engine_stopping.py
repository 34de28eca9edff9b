"""Every way to end a job early, at every moment: what is ready is kept, everything else comes back."""

from collections.abc import Callable

import pytest

from forestage.core.engine import EngineSettings
from forestage.core.errors import StoppingError
from forestage.core.job import Job, Outcome, Reason
from support.engine_driver import EngineDriver, chain, kv_model

KEYS = chain("a", 8)
SETTLE = 0.02


def _kv_driver(slots: int = 8, **settings: float) -> EngineDriver:
    driver = EngineDriver(kv_model(), [slots], EngineSettings(1 << 40, settle_s=SETTLE, **settings))  # type: ignore[arg-type]
    driver.store(KEYS)
    return driver


# ---- abort in every phase


def _queued(driver: EngineDriver) -> Job:
    driver.submit(chain("busy", 1), "busy")
    return driver.submit(KEYS)


def _probing(driver: EngineDriver) -> Job:
    return driver.submit(KEYS)


def _reserved(driver: EngineDriver) -> Job:
    job = driver.submit(KEYS)
    driver.answer_probes()
    return job


def _three_of_eight(driver: EngineDriver) -> Job:
    job = _reserved(driver)
    driver.begin_all_reads()
    for key in KEYS[:3]:
        driver.end_read(driver.flight(key))
    return job


def _out_of_order(driver: EngineDriver) -> Job:
    job = _reserved(driver)
    driver.begin_all_reads()
    for key in (KEYS[7], KEYS[0], KEYS[4]):
        driver.end_read(driver.flight(key))
    return job


def _last_in_flight(driver: EngineDriver) -> Job:
    job = _reserved(driver)
    driver.begin_all_reads()
    for key in KEYS[:7]:
        driver.end_read(driver.flight(key))
    return job


def _done(driver: EngineDriver) -> Job:
    job = driver.submit(KEYS)
    driver.run()
    return job


def _truncated(driver: EngineDriver) -> Job:
    driver.release(driver.prefetch(chain("old", 8)))
    driver.prefetch(chain("held", 3))
    return _reserved(driver)


def _after_a_storage_error(driver: EngineDriver) -> Job:
    job = _reserved(driver)
    driver.begin_all_reads()
    driver.end_read_as(driver.flight(KEYS[5]), Reason.STORAGE_ERROR)
    return job


def _stalled(driver: EngineDriver) -> Job:
    job = _reserved(driver)
    driver.begin_all_reads()
    driver.stall_read(driver.flight(KEYS[5]))
    return job


PHASES: dict[Callable[[EngineDriver], Job], int] = {
    _queued: 0,
    _probing: 0,
    _reserved: 0,
    _three_of_eight: 3,
    _out_of_order: 1,
    _last_in_flight: 7,
    _truncated: 0,
    _after_a_storage_error: 0,
    _stalled: 0,
    _done: 8,
}

EXITS: dict[str, Callable[[EngineDriver, Job], None]] = {
    "delete": lambda driver, job: driver.engine.forget(job.request.request_id, driver.now),
    "client gone": lambda driver, job: driver.engine.stop(job, Reason.CANCELLED, driver.now),
    "finish": lambda driver, job: driver.engine.stop(job, Reason.FINISHED, driver.now),
    "deadline": lambda driver, job: driver.advance(0.5),
    "shutdown": lambda driver, job: driver.engine.stop_all(driver.now),
}


@pytest.mark.parametrize("leave", EXITS)
@pytest.mark.parametrize("phase", PHASES)
def test_every_exit_in_every_phase_gives_everything_back(phase: Callable[[EngineDriver], Job], leave: str) -> None:
    driver = _kv_driver()
    driver.settings = EngineSettings(1 << 40)
    if phase is _queued:
        driver.engine.admission.budget_bytes = 1
    for keys in (chain("old", 8), chain("held", 3), chain("busy", 1)):
        driver.store(keys)
    submit = driver.engine.submit
    job = phase(driver) if leave != "deadline" else _with_deadline(driver, phase)
    assert driver.engine.submit == submit
    EXITS[leave](driver, job)
    assert job.done
    driver.check()
    if phase is not _done:
        assert job.ready == PHASES[phase]
        reason = {"delete": "cancelled", "client gone": "cancelled", "finish": "finished"}.get(leave, leave)
        assert job.shortfall[Reason(reason)] == (job.granted or 8) - job.ready
        assert (job.outcome is Outcome.CANCELLED) == (reason == "cancelled")
        assert (job.lease is None) == (reason == "cancelled" or job.ready == 0)
    final = (job.lengths(), dict(job.shortfall), job.outcome)
    EXITS[leave](driver, job)
    driver.run()
    for load in tuple(driver.stalled):
        driver.end_read_as(load, None)
    for other in tuple(driver.engine.live):
        driver.engine.stop(other, Reason.CANCELLED, driver.now)
    driver.run()
    assert (job.lengths(), job.shortfall, job.outcome) == final
    driver.advance(600.0)
    driver.check_idle()
    driver.engine.stopping = False
    driver.store(chain("next", 8))
    again = driver.prefetch(chain("next", 8))
    assert (again.outcome, again.ready) == (Outcome.COMPLETE, 8)


def _with_deadline(driver: EngineDriver, phase: Callable[[EngineDriver], Job]) -> Job:
    """Run a phase with a deadline on the job itself."""
    plain = driver.submit

    def submit(keys: list[bytes], request_id: str = "", **options: int) -> Job:
        return plain(keys, request_id, **options, **({"deadline_ms": 400} if keys == KEYS else {}))

    driver.submit = submit  # type: ignore[method-assign, assignment]
    return phase(driver)


def test_deleting_twice_or_something_unknown_changes_nothing() -> None:
    driver = _kv_driver()
    job = driver.prefetch(KEYS, lease_ms=1000)
    driver.engine.forget("never seen", driver.now)
    assert driver.shown(job) == [KEYS]
    driver.engine.forget(job.request.request_id, driver.now)
    driver.engine.forget(job.request.request_id, driver.now)
    driver.advance(600.0)
    driver.check_idle()
    assert driver.engine.leases.expired == 0


def test_an_id_can_be_used_again_after_it_was_deleted() -> None:
    driver = _kv_driver()
    first = driver.submit(KEYS, "same", deadline_ms=100)
    driver.engine.forget("same", driver.now)
    second = driver.submit(KEYS, "same")
    assert second is not first
    driver.advance(59.0)  # neither the deadline nor the forgetting of the first one concerns the second
    driver.run()
    assert (second.outcome, driver.engine.jobs["same"]) == (Outcome.COMPLETE, second)
    driver.advance(59.0)
    assert driver.engine.jobs["same"] is second
    driver.advance(1.0)
    assert driver.engine.jobs == {}


def test_finishing_a_job_that_is_done_changes_nothing() -> None:
    driver = _kv_driver()
    job = driver.prefetch(KEYS)
    driver.engine.stop(job, Reason.FINISHED, driver.now)
    driver.engine.stop(job, Reason.CANCELLED, driver.now)
    assert (job.outcome, job.shortfall, driver.shown(job)) == (Outcome.COMPLETE, {}, [KEYS])


def test_a_cancelled_job_keeps_its_last_ready_and_hands_out_nothing() -> None:
    driver = _kv_driver()
    job = _three_of_eight(driver)
    driver.engine.stop(job, Reason.CANCELLED, driver.now)
    assert (job.ready, job.outcome, job.lease) == (3, Outcome.CANCELLED, None)
    assert job.shortfall == {Reason.CANCELLED: 5}
    driver.run()
    assert driver.resident() == set(KEYS[:3])
    assert driver.pool.index[0].evictable == 3


def test_pages_behind_the_cut_go_back_at_once() -> None:
    driver = _kv_driver()
    job = _reserved(driver)
    driver.begin_all_reads()
    for key in (KEYS[6], KEYS[7]):
        driver.end_read(driver.flight(key))
    assert driver.resident() == {KEYS[6], KEYS[7]}
    driver.end_read_as(driver.flight(KEYS[5]), Reason.VANISHED)
    assert not job.done  # the pages before are still on their way
    assert driver.resident() == set()
    assert driver.pool.slots[0].free == 3
    driver.run()
    assert (job.ready, job.shortfall) == (5, {Reason.VANISHED: 3})


def test_a_lower_gap_moves_the_cut_and_its_reason() -> None:
    driver = _kv_driver()
    job = _reserved(driver)
    driver.begin_all_reads()
    driver.end_read_as(driver.flight(KEYS[6]), Reason.VANISHED)
    driver.end_read_as(driver.flight(KEYS[2]), Reason.CORRUPT)
    driver.run()
    assert (job.ready, job.shortfall) == (2, {Reason.CORRUPT: 6})


def test_stopping_refuses_new_jobs_but_knows_the_old_ones() -> None:
    driver = _kv_driver()
    job = driver.submit(KEYS, "known")
    driver.engine.stop_all(driver.now)
    assert driver.submit(KEYS, "known") is job
    with pytest.raises(StoppingError):
        driver.submit(KEYS, "new")
    with pytest.raises(StoppingError):
        driver.engine.take_lease("m", KEYS, 0, 1.0, driver.now)
    assert (job.done, job.shortfall) == (True, {Reason.SHUTDOWN: 8})


# ---- one deadline over everything


@pytest.mark.parametrize("deadline_ms", [1, 2, 500, 60_000])
@pytest.mark.parametrize("phase", [_queued, _probing, _reserved, _three_of_eight, _last_in_flight])
def test_a_job_ends_at_its_deadline_with_what_is_ready(phase: Callable[[EngineDriver], Job], deadline_ms: int) -> None:
    driver = _kv_driver()
    driver.store(chain("busy", 1))
    if phase is _queued:
        driver.engine.admission.budget_bytes = 1
    plain = driver.submit
    driver.submit = lambda keys, request_id="", **options: plain(  # type: ignore[method-assign]
        keys, request_id, **options, **({"deadline_ms": deadline_ms} if keys == KEYS else {})
    )
    job = phase(driver)
    driver.advance(deadline_ms / 1e3 - 0.0005)
    assert not job.done
    driver.advance(0.0005)
    assert (job.done, job.ready) == (True, PHASES[phase])
    assert job.shortfall == {Reason.DEADLINE: 8 - PHASES[phase]}


def test_a_page_that_never_answers_gives_what_came_before_it() -> None:
    driver = _kv_driver()
    job = driver.submit(KEYS, deadline_ms=500)
    driver.answer_probes()
    driver.begin_all_reads()
    for load in tuple(driver.in_flight):
        if load.key != KEYS[5]:
            driver.end_read(load)
    driver.advance(0.5)
    assert (job.ready, job.shortfall) == (5, {Reason.DEADLINE: 3})
    assert driver.shown(job) == [KEYS[:5]]
    assert driver.resident() == set(KEYS[:5])
    driver.end_read(driver.in_flight[0])
    assert driver.pool.slots[0].free == 3
