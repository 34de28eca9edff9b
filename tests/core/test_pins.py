"""Pins keep a prefix without handing out slots; evict lets one go first."""

import pytest

from forestage.core.engine import EngineSettings
from forestage.core.errors import GoneError, NotFoundError, StoppingError
from forestage.core.job import Lengths, Reason
from support.engine_driver import EngineDriver, chain, kv_model

KV = kv_model()


def _driver(slots: int = 40, pinned_fraction: float = 1.0) -> EngineDriver:
    driver = EngineDriver(KV, [slots], EngineSettings(1 << 40, max_pin_s=100.0), pinned_fraction)
    for name in "ab":
        driver.store(chain(name, 100))
    return driver


def test_a_pinned_prefix_outlives_pressure_until_its_time_is_over() -> None:
    driver = _driver()
    driver.release(driver.prefetch(chain("a", 10)))
    lengths, pin = driver.engine.pin("m", chain("a", 12), 0, 50.0, driver.now)
    assert lengths == Lengths(12, 10, 10, 10, 10, 10)
    assert pin is not None
    driver.release(driver.prefetch(chain("b", 40)))
    assert set(chain("a", 10)) <= driver.resident()
    driver.advance(49.0)
    assert len(driver.engine.pins) == 1
    driver.advance(1.0)
    assert (len(driver.engine.pins), pin.alive) == (0, False)
    assert (driver.engine.pins.expired, driver.engine.leases.expired) == (1, 0)
    driver.release(driver.prefetch(chain("b", 40)))
    assert driver.resident() == set(chain("b", 40))


def test_release_ends_a_pin_and_is_idempotent() -> None:
    driver = _driver()
    driver.release(driver.prefetch(chain("a", 10)))
    _, pin = driver.engine.pin("m", chain("a", 10), 0, 50.0, driver.now)
    assert pin is not None
    for _ in range(2):
        driver.engine.pins.release(pin.id)
    driver.advance(100.0)
    driver.check_idle()


def test_a_pin_is_no_lease() -> None:
    driver = _driver()
    driver.release(driver.prefetch(chain("a", 10)))
    _, pin = driver.engine.pin("m", chain("a", 10), 0, 50.0, driver.now)
    assert pin is not None
    with pytest.raises(GoneError):
        driver.engine.renew_lease(pin.id, 1.0, driver.now)
    driver.engine.leases.release(pin.id)
    assert pin.alive


def test_a_pin_lives_no_longer_than_the_longest() -> None:
    driver = _driver()
    driver.release(driver.prefetch(chain("a", 10)))
    _, pin = driver.engine.pin("m", chain("a", 10), 0, 1e6, driver.now)
    assert pin is not None
    assert pin.expires_at == driver.now + 100.0


def test_pins_and_leases_share_one_bound() -> None:
    driver = _driver(40, pinned_fraction=0.5)
    driver.release(driver.prefetch(chain("a", 20)))
    leased = driver.prefetch(chain("b", 12))
    lengths, pin = driver.engine.pin("m", chain("a", 20), 0, 50.0, driver.now)
    assert (lengths.host, lengths.ready) == (20, 8)
    assert driver.engine.pin("m", chain("a", 20)[8:], 0, 50.0, driver.now) == (Lengths(12, 12, 12, 12, 0, 0), None)
    driver.release(leased)
    assert driver.engine.pin("m", chain("a", 20), 8, 50.0, driver.now)[0].ready == 20
    assert pin is not None
    driver.check()


def test_a_pin_of_a_hybrid_prefix_keeps_its_state() -> None:
    driver = EngineDriver(kv_model(windows=[1]), [40, 2])
    keys, other = chain("a", 10), chain("b", 10)
    driver.store(keys, [(1, [6])])
    driver.store(other, [(1, [3, 10])])
    driver.release(driver.prefetch(keys))
    lengths, pin = driver.engine.pin("m", keys, 0, 50.0, driver.now)
    assert (lengths.ready, pin is not None) == (6, True)
    driver.release(driver.prefetch(other[:3]))
    driver.release(driver.prefetch(other))
    assert keys[5] in driver.resident(1)


def test_a_pin_brings_nothing_and_uses_nothing() -> None:
    driver = _driver()
    assert driver.engine.pin("m", chain("a", 10), 0, 50.0, driver.now) == (Lengths(10, 0, 0, 0, 0, 0), None)
    job = driver.prefetch(chain("a", 10), lease_ms=1)
    driver.advance(1.0)
    assert job.ready == 10
    _, pin = driver.engine.pin("m", chain("a", 10), 0, 50.0, driver.now)
    assert pin is not None
    driver.engine.pins.release(pin.id)
    assert driver.pool.index[0].used == 0


def test_refusals() -> None:
    driver = _driver()
    with pytest.raises(NotFoundError):
        driver.engine.pin("other", chain("a", 1), 0, 1.0, driver.now)
    with pytest.raises(NotFoundError):
        driver.engine.demote("other", chain("a", 1), 0)
    driver.engine.stop_all(driver.now)
    with pytest.raises(StoppingError):
        driver.engine.pin("m", chain("a", 1), 0, 1.0, driver.now)


def test_a_demoted_prefix_goes_first_from_its_deepest_page_on() -> None:
    driver = _driver(20)
    driver.release(driver.prefetch(chain("b", 10)))
    driver.release(driver.prefetch(chain("a", 10)))  # younger
    assert driver.engine.demote("m", chain("a", 12), 4) == (6, 0)
    assert driver.resident() == {*chain("a", 10), *chain("b", 10)}  # still hits until somebody needs their slots
    driver.store(chain("c", 10))
    driver.release(driver.prefetch(chain("c", 4)))
    assert driver.resident() == {*chain("a", 6), *chain("b", 10), *chain("c", 4)}
    driver.release(driver.prefetch(chain("c", 7)))
    assert driver.resident() == {*chain("a", 4), *chain("b", 9), *chain("c", 7)}


def test_what_somebody_holds_is_not_demoted() -> None:
    driver = _driver(20)
    leased = driver.prefetch(chain("a", 6))
    driver.release(driver.prefetch(chain("a", 10)))
    assert driver.engine.demote("m", chain("a", 10), 0) == (4, 6)
    driver.release(leased)
    driver.check()


def test_a_demoted_page_that_is_wanted_again_is_as_young_as_others() -> None:
    driver = _driver(20)
    driver.release(driver.prefetch(chain("b", 10)))
    driver.release(driver.prefetch(chain("a", 10)))
    driver.engine.demote("m", chain("a", 10), 0)
    driver.release(driver.prefetch(chain("a", 10)))
    driver.store(chain("c", 10))
    driver.release(driver.prefetch(chain("c", 10)))
    assert driver.resident() == {*chain("a", 10), *chain("c", 10)}


def test_a_pinned_page_that_a_stopped_job_brought_stays() -> None:
    driver = _driver()
    job = driver.submit(chain("a", 10))
    driver.answer_probes()
    driver.begin_all_reads(4 * 256)
    for load in tuple(driver.in_flight)[:4]:
        driver.end_read(load)
    lengths, pin = driver.engine.pin("m", chain("a", 10), 0, 50.0, driver.now)
    assert (lengths.ready, pin is not None) == (4, True)
    driver.engine.stop(job, Reason.CANCELLED, driver.now)
    driver.run()
    assert set(chain("a", 4)) <= driver.resident()
