"""When a deadline cuts a hybrid job, and who waits in the queue for nothing."""

from forestage.core.engine import EngineSettings
from forestage.core.job import Job, JobState, PrefetchRequest, Reason
from support.engine_driver import EngineDriver, chain, kv_model


def _loading(driver: EngineDriver, pages: int, states: list[int], done: int) -> Job:
    """Begin all reads of a job with a deadline of one second, and end those of the first `done` pages."""
    keys = chain("a", pages)
    driver.store(keys, [(1, states)])
    job = driver.submit(keys, deadline_ms=1000)
    driver.answer_probes()
    while driver.begin_reads():
        pass
    for load in sorted(driver.in_flight, key=lambda load: load.page)[:done]:
        driver.end_read(load)
    return job


def test_time_is_left_for_a_state_that_can_be_read() -> None:
    driver = EngineDriver(kv_model(windows=[1]), [16, 4], EngineSettings(1 << 40, settle_s=0.4))
    job = _loading(driver, 8, [4, 8], 6)
    driver.advance(0.61)
    assert job.stop_reason is Reason.DEADLINE
    driver.begin_reads()
    for load in [load for load in driver.in_flight if load.component == 1 and load.page == 3]:
        driver.end_read(load)
    assert (job.ready, job.shortfall) == (4, {Reason.DEADLINE: 4})
    for load in tuple(driver.in_flight):
        driver.end_read(load)
    driver.check()


def test_without_a_state_to_read_the_whole_deadline_is_used() -> None:
    driver = EngineDriver(kv_model(windows=[1]), [16, 4], EngineSettings(1 << 40, settle_s=0.4))
    job = _loading(driver, 8, [8], 6)
    driver.advance(0.61)
    assert (job.state, job.stop_reason) == (JobState.LOADING, None)
    driver.advance(0.38)
    assert job.state is JobState.LOADING
    for load in tuple(driver.in_flight):
        driver.end_read(load)
    assert (job.done, job.ready) == (True, 8)
    driver.check()


def test_the_deadline_itself_ends_a_job_that_went_on() -> None:
    driver = EngineDriver(kv_model(windows=[1]), [16, 4], EngineSettings(1 << 40, settle_s=0.4))
    job = _loading(driver, 8, [8], 6)
    driver.advance(0.61)
    driver.advance(0.4)
    assert (job.done, job.ready, job.shortfall) == (True, 0, {Reason.DEADLINE: 8})
    for load in tuple(driver.in_flight):
        driver.end_read(load)
    driver.check()


def test_a_job_that_is_not_loading_has_its_whole_deadline() -> None:
    driver = EngineDriver(kv_model(windows=[1]), [16, 4], EngineSettings(1 << 40, settle_s=0.4))
    job = driver.submit(chain("a", 8), deadline_ms=1000)
    driver.advance(0.99)
    assert job.state is JobState.PROBING
    driver.advance(0.02)
    assert (job.done, job.shortfall) == (True, {Reason.DEADLINE: 8})
    driver.check()


def test_a_queued_job_joins_once_its_pages_are_on_their_way() -> None:
    keys = chain("a", 8)
    driver = EngineDriver(kv_model(), [16], EngineSettings(budget_bytes=8 * 256))
    driver.store(keys)
    first = driver.submit(keys)
    second = driver.submit(keys, priority=1)  # in the same moment: nothing is granted yet
    assert (first.state, second.state) == (JobState.PROBING, JobState.QUEUED)
    driver.answer_probes()
    driver.answer_probes()
    assert (first.state, second.state) == (JobState.LOADING, JobState.LOADING)
    driver.run()
    assert (second.ready, second.count_pages()) == (8, (0, 8))
    assert len(driver.reads) == 8


def test_a_deadline_counts_from_the_arrival_even_if_it_has_passed() -> None:
    for waited, ended in ((0.4, False), (0.6, True), (5.0, True)):
        driver = EngineDriver(kv_model(windows=[1]), [16, 4], EngineSettings(1 << 40, settle_s=0.0))
        driver.now = 100.0
        keys = tuple(chain("a", 4))
        request = PrefetchRequest("r", driver.layout.name, keys, deadline_ms=500)
        job = driver.engine.submit(request, driver.now, driver.now - waited)
        assert (job.deadline, job.timing.arrived) == (100.5 - waited, 100.0 - waited)
        driver.advance(0.0)
        assert job.done is ended
        driver.advance(0.2)
        assert (job.done, job.shortfall) == (True, {Reason.DEADLINE: 4})
        driver.check()
