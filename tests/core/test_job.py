"""The state table of a job, its counts, and what makes two requests equal."""

from dataclasses import replace

import pytest

from forestage.core.engine import EngineSettings
from forestage.core.job import TRANSITIONS, JobState, Reason, Timing
from support.engine_driver import EngineDriver, chain, job_of, kv_model

POSSIBLE = {
    (JobState.QUEUED, JobState.PROBING),
    (JobState.QUEUED, JobState.DONE),
    (JobState.PROBING, JobState.LOADING),
    (JobState.PROBING, JobState.DONE),
    (JobState.LOADING, JobState.DONE),
}


@pytest.mark.parametrize("after", JobState)
@pytest.mark.parametrize("before", JobState)
def test_only_the_transitions_of_the_table_are_possible(before: JobState, after: JobState) -> None:
    job = job_of("a")
    job.state = before
    assert (after in TRANSITIONS[before]) == ((before, after) in POSSIBLE)
    if (before, after) in POSSIBLE:
        job.enter(after)
        assert job.state is after
    else:
        with pytest.raises(RuntimeError, match="cannot become"):
            job.enter(after)
        assert job.state is before


def test_the_engine_takes_every_one_of_them() -> None:
    """Each transition of the table happens to some job: nothing in it is dead."""
    keys, seen = chain("a", 4), set()
    driver = EngineDriver(kv_model(), [4], EngineSettings(budget_bytes=1))
    driver.store(keys)

    first, second, third = (driver.submit(keys) for _ in range(3))
    assert [job.state for job in (first, second, third)] == [JobState.PROBING, JobState.QUEUED, JobState.QUEUED]
    driver.engine.stop(third, Reason.FINISHED, driver.now)
    assert third.done
    seen.add((JobState.QUEUED, JobState.DONE))
    driver.engine.stop(first, Reason.FINISHED, driver.now)
    assert (first.done, second.state) == (True, JobState.PROBING)
    seen |= {(JobState.PROBING, JobState.DONE), (JobState.QUEUED, JobState.PROBING)}
    driver.answer_probes()
    assert second.state is JobState.LOADING
    seen.add((JobState.PROBING, JobState.LOADING))
    driver.run()
    assert second.done
    seen.add((JobState.LOADING, JobState.DONE))
    assert seen == POSSIBLE


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"keys": tuple(chain("a", 7))},
        {"keys": tuple(chain("a", 8)[::-1])},
        {"device_pages": 1},
        {"min_pages": 2},
        {"priority": 1},
        {"deadline_ms": 5},
        {"lease_ms": 5},
        {"tenant": "other"},
    ],
)
def test_a_request_differs_by_everything_but_its_id(change: dict[str, object]) -> None:
    request = job_of("a").request
    assert replace(request, **change).digest() != request.digest()  # type: ignore[arg-type]
    assert replace(request, request_id="other").digest() == request.digest()


def test_keys_that_run_together_differ() -> None:
    request = job_of("a").request
    one = replace(request, keys=(b"x" * 16, b"y" * 17))
    other = replace(request, keys=(b"x" * 16 + b"y", b"y" * 16))
    assert one.digest() != other.digest()


def test_spans_of_time_add_up() -> None:
    timing = Timing(10.0)
    assert timing.spans_ms(10.5) == {"queued": 500.0, "probe": 0.0, "load": 0.0, "total": 500.0}
    timing.started, timing.granted, timing.done = 11.0, 13.0, 17.0
    assert timing.spans_ms(99.0) == {"queued": 1000.0, "probe": 2000.0, "load": 4000.0, "total": 7000.0}


def test_a_finished_job_keeps_no_pages() -> None:
    """It is remembered for a minute; its keys, masks and slots by page are not."""
    driver = EngineDriver(kv_model(windows=[1]), [64, 2])
    keys = chain("a", 64)
    driver.store(keys, [(1, [64])])
    job = driver.prefetch(keys)
    assert (job.keys, job.request.keys, job.masks) == ((), (), None)
    assert (job.holds, job.pending, job.arrived_pages, job.draining) == ([], [], [], set())
    assert (job.loaded_pages, job.joined_pages, job.count_pages()) == (set(), set(), (64, 0))
    assert driver.submit(keys, job.request.request_id) is job


@pytest.mark.parametrize(
    "lengths",
    [
        {"host": 9},
        {"stored": 9},
        {"host": 5, "stored": 4},
        {"restorable": 7, "stored": 6},
        {"granted": 4, "restorable": 3, "stored": 8},
        {"ready": 2, "granted": 1, "restorable": 8, "stored": 8},
    ],
)
def test_broken_arithmetic_is_noticed(lengths: dict[str, int]) -> None:
    job = job_of("a", 8)
    job.check_integrity()
    for name, pages in lengths.items():
        setattr(job, name, pages)
    with pytest.raises(RuntimeError):
        job.check_integrity()
