"""Thousands of jobs that start and end at random moments: nothing is lost, and nothing piles up."""

import gc
import random
import tracemalloc

from forestage.core.engine import EngineSettings
from forestage.core.errors import CapacityError
from forestage.core.job import Job, Outcome, Reason
from support.engine_driver import EngineDriver, chain, kv_model

SLOTS = 48


def _driver(keep_done_s: float = 1.0) -> tuple[EngineDriver, list[list[bytes]]]:
    settings = EngineSettings(budget_bytes=9000, queue_limit=6, settle_s=0.005, keep_done_s=keep_done_s)
    driver = EngineDriver(kv_model(windows=[2]), [SLOTS, 8], settings)
    trunk = chain("t", 24)
    chains = [trunk, *(chain(f"b{number}", 24, trunk[: 4 * number]) for number in range(1, 6)), chain("z", 24)]
    for keys in chains:
        driver.store(keys, [(1, [4, 5, 9, 10, 15, 16, 23, 24])])
    return driver, chains


def _one_cycle(driver: EngineDriver, chains: list[list[bytes]], rng: random.Random) -> Job | None:
    """Start a job and do a few things; whatever is under way stays so."""
    try:
        job: Job | None = driver.submit(
            rng.choice(chains)[: rng.randint(1, 24)],
            device_pages=rng.choice([0, 0, 0, 1]),
            deadline_ms=rng.choice([0, 0, 1, 7, 30]),
            lease_ms=rng.choice([1, 20, 200]),
            priority=rng.choice([0, 0, 1]),
        )
    except CapacityError:
        job = None
    for _ in range(rng.randint(0, 8)):
        act = rng.random()
        if act < 0.2:
            driver.answer_probes()
        elif act < 0.45:
            driver.begin_reads(rng.choice([1, 1000, 4000]))
        elif act < 0.8 and driver.in_flight:
            load = rng.choice(driver.in_flight)
            if rng.random() < 0.05:
                driver.stall_read(load)
            else:
                driver.end_read_as(load, rng.choice([None] * 12 + [Reason.VANISHED, Reason.CORRUPT]))
        elif act < 0.85 and driver.stalled:
            driver.end_read(driver.stalled[0])
        elif act < 0.95 and driver.engine.live:
            victim = rng.choice(sorted(driver.engine.live, key=lambda live: live.timing.arrived))
            if rng.random() < 0.5:
                driver.engine.stop(victim, rng.choice([Reason.FINISHED, Reason.CANCELLED]), driver.now)
            else:
                driver.engine.forget(victim.request.request_id, driver.now)
        else:
            driver.advance(rng.choice([0.001, 0.003, 0.02]))
    return job


def _settle(driver: EngineDriver) -> None:
    driver.run()
    for load in tuple(driver.stalled):
        driver.end_read(load)
    driver.run()
    driver.advance(1000.0)


def test_ten_thousand_jobs_leave_everything_as_it_was() -> None:
    driver, chains = _driver()
    rng = random.Random(11)
    outcomes: dict[Outcome | None, int] = {}
    jobs = []
    for number in range(10_000):
        job = _one_cycle(driver, chains, rng)
        if job is not None:
            jobs.append(job)
        if number % 500 == 0:
            driver.check()
        if number % 2500 == 2499:
            _settle(driver)
            driver.check_idle()
            for done in jobs:
                outcomes[done.outcome] = outcomes.get(done.outcome, 0) + 1
            jobs.clear()
    assert {*outcomes} == {Outcome.COMPLETE, Outcome.PARTIAL, Outcome.MISS, Outcome.CANCELLED}
    keys = chain("last", SLOTS)
    driver.store(keys, [(1, [SLOTS - 1, SLOTS])])
    job = driver.prefetch(keys)
    assert (job.outcome, job.ready) == (Outcome.COMPLETE, SLOTS)


def test_cycling_twice_the_pool_keeps_all_of_it() -> None:
    driver = EngineDriver(kv_model(), [32])
    chains = [chain("a", 32), chain("b", 32)]
    for keys in chains:
        driver.store(keys)
    for number in range(50):
        job = driver.prefetch(chains[number % 2])
        assert job.ready == 32
        driver.release(job)


def test_memory_does_not_grow_with_the_jobs_that_were() -> None:
    driver, chains = _driver(keep_done_s=0.05)
    rng = random.Random(5)

    def run(jobs: int) -> int:
        for _ in range(jobs):
            _one_cycle(driver, chains, rng)
            driver.engine.finished.clear()
        _settle(driver)
        driver.engine.finished.clear()
        driver.reads.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = run(200)
        assert run(800) - before < 10_000
    finally:
        tracemalloc.stop()


def test_far_deadlines_are_not_kept() -> None:
    driver = EngineDriver(kv_model(), [8], EngineSettings(1 << 40, keep_done_s=0.0))
    driver.store(chain("a", 8))
    for _ in range(500):
        job = driver.prefetch(chain("a", 8), deadline_ms=86_400_000)
        driver.release(job)
        driver.advance(0.001)
    assert len(driver.engine._timers._heap) < 80
    driver.check_idle()
