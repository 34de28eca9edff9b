"""Verdicts on hints, and the memory of envelopes."""

import pytest

from forestage.core.engine import EngineSettings
from forestage.core.errors import ConflictError
from forestage.core.hint_memory import HintMemory
from forestage.core.hints import _OUTCOMES, HintOutcome, judge_demotion, judge_job, judge_pin
from forestage.core.job import Job, JobState, Lengths, Reason
from support.engine_driver import EngineDriver, chain, job_of, kv_model


def _ended(shortfall: dict[Reason, int]) -> Job:
    job = job_of("a")
    job.shortfall = shortfall
    job.enter(JobState.DONE)
    return job


def test_every_reason_has_an_outcome() -> None:
    assert set(_OUTCOMES) == set(Reason)
    for reason, outcome in _OUTCOMES.items():
        assert judge_job(_ended({reason: 2})) == (outcome, reason.value)


@pytest.mark.parametrize(
    ("shortfall", "outcome", "reason"),
    [
        ({}, HintOutcome.ACCEPTED, None),
        ({Reason.NOT_STORED: 9, Reason.HOST_CAPACITY: 1}, HintOutcome.CLIPPED, "host_capacity"),
        ({Reason.NO_BOUNDARY: 3, Reason.HOST_CAPACITY: 1}, HintOutcome.CLIPPED, "no_boundary"),
        ({Reason.HOST_CAPACITY: 8, Reason.BELOW_MIN_PAGES: 1}, HintOutcome.REJECTED, "below_min_pages"),
        ({Reason.NOT_STORED: 1, Reason.CORRUPT: 2}, HintOutcome.MISSING, "corrupt"),
    ],
)
def test_the_strongest_reason_decides(shortfall: dict[Reason, int], outcome: HintOutcome, reason: str | None) -> None:
    assert judge_job(_ended(shortfall)) == (outcome, reason)


def test_a_job_that_waits_is_deferred_and_one_that_runs_accepted() -> None:
    driver = EngineDriver(kv_model(), [20], EngineSettings(256 * 8))
    driver.store(chain("a", 8))
    driver.store(chain("b", 8))
    first = driver.submit(chain("a", 8))
    second = driver.submit(chain("b", 8))
    assert (judge_job(first), judge_job(second)) == ((HintOutcome.ACCEPTED, None), (HintOutcome.DEFERRED, "queued"))
    driver.run()
    assert judge_job(second) == (HintOutcome.ACCEPTED, None)


@pytest.mark.parametrize(
    ("lengths", "outcome", "reason"),
    [
        (Lengths(8, 8, 8, 8, 8, 8), HintOutcome.ACCEPTED, None),
        (Lengths(9, 8, 8, 8, 8, 8), HintOutcome.MISSING, "not_resident"),
        (Lengths(9, 8, 8, 8, 5, 5), HintOutcome.CLIPPED, "host_capacity"),
        (Lengths(9, 8, 8, 4, 4, 4), HintOutcome.CLIPPED, "no_boundary"),
    ],
)
def test_pins(lengths: Lengths, outcome: HintOutcome, reason: str | None) -> None:
    assert judge_pin(lengths) == (outcome, reason)


def test_demotions() -> None:
    assert judge_demotion(3, 0) == (HintOutcome.ACCEPTED, None)
    assert judge_demotion(3, 1) == (HintOutcome.CLIPPED, "held")
    assert judge_demotion(0, 0) == (HintOutcome.MISSING, "not_resident")


def test_an_envelope_is_remembered_by_sender_and_content_for_a_while() -> None:
    memory = HintMemory[str](10.0)
    assert memory.find("a", "m", b"1", 0.0) is None
    memory.remember("a", "m", b"1", ("x", "y"), 0.0)
    assert memory.find("a", "m", b"1", 9.0) == ("x", "y")
    assert memory.find("b", "m", b"1", 9.0) is None
    assert memory.find(None, "m", b"1", 9.0) is None
    with pytest.raises(ConflictError):
        memory.find("a", "m", b"2", 9.0)
    memory.check_integrity()
    assert memory.find("a", "m", b"2", 10.0) is None
    assert len(memory) == 0


def test_an_envelope_without_an_id_is_always_new() -> None:
    memory = HintMemory[str](10.0)
    memory.remember("a", "", b"1", ("x",), 0.0)
    assert memory.find("a", "", b"1", 0.0) is None
    memory = HintMemory[str](0.0)
    memory.remember("a", "m", b"1", ("x",), 0.0)
    assert (memory.find("a", "m", b"1", 0.0), len(memory)) == (None, 0)


def test_memory_is_bounded_by_actions() -> None:
    memory = HintMemory[str](10.0, max_actions=5)
    for number in range(4):
        memory.remember(None, str(number), b"", ("x", "y"), float(number))
        memory.check_integrity()
    assert len(memory) == 2
    assert memory.find(None, "1", b"", 4.0) is None
    assert memory.find(None, "2", b"", 4.0) == ("x", "y")
    memory.remember(None, "large", b"", ("x",) * 9, 5.0)
    assert (len(memory), memory.find(None, "large", b"", 5.0)) == (1, ("x",) * 9)
    memory.check_integrity()
