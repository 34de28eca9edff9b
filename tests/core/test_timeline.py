"""What the engine notes of a job, in which order, and that it stays bounded."""

import pytest

from forestage.core.engine import EngineSettings
from forestage.core.job import Job, Reason
from forestage.core.timeline import MAX_CUTS, Event, Timeline
from support.engine_driver import EngineDriver, chain, kv_model

KEYS = chain("a", 8)


def _told(job: Job) -> list[tuple[str, int, str | None]]:
    job.timeline.check_integrity()
    return [(moment.event.value, moment.pages, moment.reason) for moment in job.timeline.moments()]


def test_a_job_that_reads_everything() -> None:
    driver = EngineDriver(kv_model(), [8])
    driver.store(KEYS)
    job = driver.submit(KEYS)
    driver.advance(1)
    driver.answer_probes()
    driver.begin_all_reads()
    for key in KEYS:
        driver.advance(1)
        driver.end_read(driver.flight(key))
    assert _told(job) == [
        ("arrived", 8, None),
        ("admitted", 0, None),
        ("probe", 0, None),
        ("grant", 8, None),
        ("first_page", 1, None),
        ("last_page", 8, None),
        ("done", 8, None),
    ]
    at = [round(moment.at - job.timing.arrived) for moment in job.timeline.moments()]
    assert at == [0, 0, 0, 1, 2, 9, 9]


def test_one_that_finds_everything_resident_asks_nobody() -> None:
    driver = EngineDriver(kv_model(), [8])
    driver.store(KEYS)
    driver.submit(KEYS)
    driver.answer_probes()
    driver.begin_all_reads()
    for key in KEYS:
        driver.end_read(driver.flight(key))
    job = driver.submit(KEYS)
    assert [event for event, _, _ in _told(job)] == ["arrived", "admitted", "grant", "done"]


def test_a_page_that_vanished_cuts_and_a_hybrid_one_settles() -> None:
    driver = EngineDriver(kv_model(windows=[1]), [8, 2], EngineSettings(1 << 40, settle_s=0.5))
    driver.store(KEYS, [(1, [4, 8])])
    driver.failing[0, KEYS[6]] = Reason.VANISHED
    job = driver.submit(KEYS)
    driver.answer_probes()
    driver.begin_all_reads()
    for key in KEYS[:7]:
        driver.end_read(driver.flight(key))
    driver.begin_all_reads()
    driver.end_read(driver.flight(KEYS[3], 1))
    assert (job.done, job.ready) == (True, 4)
    assert _told(job)[-4:] == [
        ("last_page", 6, None),
        ("cut", 6, "vanished"),
        ("settle", 4, None),
        ("done", 4, None),
    ]


@pytest.mark.parametrize(("masks", "reason"), [(None, "storage_unavailable"), ([bytes(8)], None)])
def test_the_grant_says_whether_l3_could_be_asked(masks: list[bytes] | None, reason: str | None) -> None:
    driver = EngineDriver(kv_model(), [8])
    job = driver.submit(KEYS)
    driver.engine.probe_answered(driver.engine.probes.popleft(), masks, driver.now)
    assert ("grant", 0, reason) in _told(job)


def test_a_job_that_waits_and_is_cancelled() -> None:
    driver = EngineDriver(kv_model(), [8], EngineSettings(budget_bytes=1))
    driver.store(KEYS)
    driver.submit(KEYS)
    waiting = driver.submit(chain("b", 4))
    assert _told(waiting) == [("arrived", 4, None)]
    driver.engine.stop(waiting, Reason.CANCELLED, driver.now)
    assert _told(waiting) == [("arrived", 4, None), ("cut", 0, "cancelled"), ("done", 0, None)]


def test_cuts_are_bounded_and_the_same_one_counts_once() -> None:
    timeline = Timeline()
    timeline.note(0.0, Event.ARRIVED, 99)
    for limit in range(99, 0, -1):
        timeline.note_cut(1.0, limit, "corrupt")
        timeline.note_cut(1.0, limit, "corrupt")
    timeline.check_integrity()
    assert len(timeline.noted) == 1 + MAX_CUTS
    assert timeline.num_cuts >= 99


def test_a_timeline_that_goes_on_after_its_end_is_noticed() -> None:
    timeline = Timeline()
    timeline.note(0.0, Event.ARRIVED, 1)
    timeline.note(1.0, Event.DONE, 1)
    timeline.check_integrity()
    timeline.note(2.0, Event.GRANT, 1)
    with pytest.raises(RuntimeError, match="after the end"):
        timeline.check_integrity()
