"""What comes and goes is recorded while somebody listens, in order, with a bounded memory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forestage.core.residency import Residency, ResidencyEvent
from support.engine_driver import EngineDriver, chain, kv_model


def _driver(slots: int = 8) -> EngineDriver:
    driver = EngineDriver(kv_model(windows=[1]), [slots, 4])
    for name in "abc":
        driver.store(chain(name, 8), [(1, (4, 8))])
    return driver


def _log(driver: EngineDriver, capacity: int = 1000) -> Residency:
    return Residency({"m": driver.pool}, capacity)


def _replay(resident: dict[str, set[bytes]], events: list[ResidencyEvent]) -> None:
    for event in events:
        keys = resident[event.place.component]
        assert (event.key in keys) != event.stored
        keys ^= {event.key}


def _now(driver: EngineDriver) -> dict[str, set[bytes]]:
    return {"kv": driver.resident(0), "tail0": driver.resident(1)}


def test_nothing_is_recorded_without_a_listener() -> None:
    driver = _driver()
    log, before = _log(driver), driver.pool._events
    driver.release(driver.prefetch(chain("a", 8)))
    assert (log.next, list(log.resident()), driver.pool._events is before) == (0, [], True)
    log.listen()
    assert driver.pool._events is not before
    log.leave()
    assert driver.pool._events is before
    log.check_integrity()


def test_what_happened_adds_up_to_what_is_there() -> None:
    driver = _driver()
    driver.release(driver.prefetch(chain("a", 8)))
    log = _log(driver)
    log.listen()
    resident = {place.component: set(keys) for place, keys in log.resident()}
    assert resident == _now(driver)
    start = log.next
    for name in "bca":
        driver.release(driver.prefetch(chain(name, 8)))
        log.check_integrity()
    driver.write(chain("d", 3))
    log.check_integrity()
    events = log.read(start, 1000)
    assert events is not None
    assert {event.stored for event in events} == {True, False}
    _replay(resident, events)
    assert resident == _now(driver)
    driver.check()


def test_a_reader_that_is_too_slow_finds_out() -> None:
    driver = _driver()
    log = _log(driver, capacity=10)
    log.listen()
    driver.release(driver.prefetch(chain("a", 8)))
    assert log.next == 9
    assert len(log.read(0, 5) or ()) == 5
    driver.release(driver.prefetch(chain("b", 8)))
    assert log.read(0, 5) is None
    assert len(log.read(log.oldest, 1000) or ()) == 10
    assert log.read(log.oldest - 1, 1) is None
    assert log.read(log.next, 1) == []
    assert log.read(log.next + 1, 1) is None
    log.check_integrity()


def test_a_number_from_before_nobody_listened_is_lost() -> None:
    driver = _driver()
    log = _log(driver)
    log.listen()
    log.listen()
    at = log.next
    log.leave()
    assert log.read(at, 1) == []
    log.leave()
    log.listen()
    assert log.read(at, 1) is None
    assert log.read(log.next, 1) == []
    log.check_integrity()


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(st.sampled_from(["a", "b", "c", "listen", "leave", "read"]), max_size=25),
    capacity=st.integers(1, 30),
)
def test_any_order_of_steps_keeps_the_law(steps: list[str], capacity: int) -> None:
    driver = _driver(6)
    log = _log(driver, capacity)
    known: dict[str, set[bytes]] | None = None
    at = 0
    for step in steps:
        if step == "listen":
            log.listen()
        elif step == "leave":
            if log.listeners:
                log.leave()
        elif step != "read":
            driver.release(driver.prefetch(chain(step, 5)))
        elif log.listeners:
            events = log.read(at, 1000)
            if known is not None and events is not None:
                _replay(known, events)
            else:
                known = {place.component: set(keys) for place, keys in log.resident()}
            at = log.next
            assert known == _now(driver)
        log.check_integrity()
    driver.check()


def test_a_defect_is_found() -> None:
    driver = _driver()
    log = _log(driver)
    log.listen()
    driver.release(driver.prefetch(chain("a", 8)))
    log._recorders["m"][0].pages.popitem()
    with pytest.raises(RuntimeError, match="7 pages recorded"):
        log.check_integrity()
