"""Leases: what they cover, when they end, and that late or double calls change nothing."""

import pytest

from forestage.core.engine import EngineSettings
from forestage.core.errors import GoneError
from forestage.core.job import Lengths, Outcome, Reason
from support.engine_driver import EngineDriver, chain, kv_model

KEYS = chain("a", 8)
OTHER = chain("b", 8)


def _driver(slots: int = 8, **settings: float) -> EngineDriver:
    driver = EngineDriver(kv_model(), [slots], EngineSettings(1 << 40, **settings))  # type: ignore[arg-type]
    driver.store(KEYS)
    driver.store(OTHER)
    return driver


def test_leased_pages_stay_and_others_are_told_why() -> None:
    driver = _driver()
    job = driver.prefetch(KEYS, lease_ms=1000)
    refused = driver.prefetch(OTHER)
    assert (refused.ready, refused.shortfall) == (0, {Reason.HOST_CAPACITY: 8})
    driver.advance(0.999)
    assert driver.shown(job) == [KEYS]


@pytest.mark.parametrize("pages", [1, 8])
def test_a_consumer_that_comes_late_without_pressure(pages: int) -> None:
    """The lease is gone for sure, the pages are still there for the next lease."""
    driver = _driver()
    job = driver.prefetch(KEYS[:pages], lease_ms=1000)
    assert job.lease is not None
    driver.advance(1.3)
    assert not job.lease.alive
    assert driver.engine.leases.expired == 1
    with pytest.raises(GoneError):
        driver.engine.renew_lease(job.lease.id, 1.0, driver.now)
    lengths, lease = driver.engine.take_lease("m", KEYS[:pages], 0, 1.0, driver.now)
    assert lease is not None
    assert lengths == Lengths(pages, pages, pages, pages, pages, pages)
    assert lease.slots == job.lease.slots


@pytest.mark.parametrize("pages", [1, 8])
def test_a_consumer_that_comes_late_and_another_has_taken_the_slots(pages: int) -> None:
    """It finds out, and its late calls do not touch the other's lease."""
    driver = _driver(pages)
    late = driver.prefetch(KEYS[:pages], lease_ms=1000)
    assert late.lease is not None
    driver.advance(1.3)
    other = driver.prefetch(OTHER[:pages])
    assert other.lease is not None
    assert sorted(other.lease.slots[0]) == sorted(late.lease.slots[0])
    with pytest.raises(GoneError):
        driver.engine.renew_lease(late.lease.id, 1.0, driver.now)
    for _ in range(2):
        driver.engine.leases.release(late.lease.id)
        driver.check()
    assert driver.shown(other) == [OTHER[:pages]]
    assert driver.prefetch(KEYS[:pages]).ready == 0
    driver.advance(100.0)
    assert driver.prefetch(KEYS[:pages]).outcome is Outcome.COMPLETE


def test_an_expired_lease_is_gone_before_the_clock_was_looked_at() -> None:
    driver = _driver()
    job = driver.prefetch(KEYS, lease_ms=1000)
    assert job.lease is not None
    driver.now += 1.0
    with pytest.raises(GoneError):
        driver.engine.renew_lease(job.lease.id, 1.0, driver.now)


def test_renewing_moves_the_end_from_now_and_not_past_the_limit() -> None:
    driver = _driver(max_lease_s=5.0)
    job = driver.prefetch(KEYS, lease_ms=60_000)
    assert job.lease is not None
    assert job.lease.expires_at == driver.now + 5.0
    driver.advance(4.0)
    assert driver.engine.renew_lease(job.lease.id, 3.0, driver.now) is job.lease
    driver.advance(2.5)
    assert len(driver.engine.leases) == 1
    driver.engine.renew_lease(job.lease.id, 0.1, driver.now)  # shorter is allowed as well
    driver.advance(0.1)
    assert not job.lease.alive
    assert driver.engine.leases.expired == 1


def test_two_leases_on_the_same_pages_are_told_apart() -> None:
    driver = _driver()
    first, second = driver.prefetch(KEYS), driver.prefetch(KEYS)
    driver.release(first)
    driver.release(first)
    driver.check()
    assert driver.shown(second) == [KEYS]
    assert driver.pool.index[0].held == 8


def test_a_lease_without_a_job_covers_what_is_resident_and_restorable() -> None:
    driver = EngineDriver(kv_model(windows=[2]), [8, 4])
    driver.store(KEYS, [(1, [3, 4, 7, 8])])
    driver.release(driver.prefetch(KEYS))
    driver.lose(KEYS[6])
    lengths, lease = driver.engine.take_lease("m", KEYS, 0, 1.0, driver.now)
    assert (lengths, lease) == (Lengths(8, 6, 6, 0, 0, 0), None)
    driver.release(driver.prefetch(KEYS[:4]))
    lengths, lease = driver.engine.take_lease("m", KEYS, 1, 1.0, driver.now)
    assert lengths == Lengths(8, 6, 6, 4, 4, 4)
    assert lease is not None
    assert [[driver.logs[c].visible[slot] for slot in slots] for c, slots in enumerate(lease.slots)] == [
        KEYS[1:4],
        KEYS[2:4],
    ]
    driver.check()


def test_a_lease_takes_no_more_than_may_be_pinned() -> None:
    driver = EngineDriver(kv_model(), [8], pinned_fraction=0.5)
    driver.store(KEYS)
    driver.release(driver.prefetch(KEYS[:4]))
    driver.release(driver.prefetch(KEYS, device_pages=4))
    lengths, lease = driver.engine.take_lease("m", KEYS, 0, 1.0, driver.now)
    assert (lengths.host, lengths.restorable, lengths.ready) == (8, 8, 4)
    assert lease is not None
    driver.check()


def test_nothing_resident_gives_no_lease() -> None:
    driver = _driver()
    assert driver.engine.take_lease("m", KEYS, 3, 1.0, driver.now) == (Lengths(8, 3, 3, 3, 3, 3), None)
    assert len(driver.engine.leases) == 0


def test_a_lease_outlives_the_memory_of_its_job() -> None:
    driver = _driver(keep_done_s=1.0)
    job = driver.prefetch(KEYS, lease_ms=10_000)
    driver.advance(1.0)
    assert driver.engine.jobs == {}
    assert driver.shown(job) == [KEYS]
    driver.advance(9.0)
    driver.check_idle()


def test_renewing_often_keeps_one_timer() -> None:
    driver = _driver()
    job = driver.prefetch(KEYS)
    assert job.lease is not None
    before = len(driver.engine._timers)
    for _ in range(1000):
        driver.engine.renew_lease(job.lease.id, 30.0, driver.now)
    assert len(driver.engine._timers) == before


def test_what_is_used_is_counted_once() -> None:
    driver = _driver(16)
    job = driver.prefetch(KEYS)
    index = driver.pool.index[0]
    assert (index.used, index.unused) == (0, 0)
    driver.release(job)  # its holder has consumed it
    driver.prefetch(KEYS)
    assert index.used == 8
    ignored = driver.prefetch(OTHER[:4], lease_ms=1)
    assert ignored.ready == 4
    driver.advance(0.1)
    driver.store(chain("c", 8))
    driver.prefetch(chain("c", 8))
    assert (index.used, index.unused) == (8, 4)
