"""Wants and expectations: what is evicted last, for whom, how much of it, and until when."""

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forestage.core.engine import EngineSettings
from forestage.core.errors import CapacityError, StoppingError
from forestage.core.expectations import Expectations
from forestage.core.job import JobState, Reason
from forestage.core.timers import Timers
from forestage.core.wants import Want, Wants
from support.engine_driver import EngineDriver, chain, kv_model


class Marked:
    """What is resident, and what is marked."""

    def __init__(self) -> None:
        self.resident: set[bytes] = set()
        self.marks: set[bytes] = set()

    def find(self, key: bytes) -> int:
        return 0 if key in self.resident else -1

    def set_wanted(self, keys: Iterable[bytes], wanted: bool) -> None:
        for key in keys:
            assert (key in self.marks) != wanted
            (self.marks.add if wanted else self.marks.discard)(key)


class WantsMachine(RuleBasedStateMachine):
    """Prefixes of a small tree are wanted and not wanted any more while their pages come and go."""

    @initialize(limit=st.integers(1, 14))
    def build(self, limit: int) -> None:
        trunk = chain("t", 6)
        self.chains = [trunk, chain("b", 6, trunk[:3]), chain("c", 6)]
        self.marked, self.limit = Marked(), limit
        self.wants = Wants([self.marked], limit)
        self.alive: list[Want] = []

    @rule(number=st.integers(0, 2), length=st.integers(1, 6))
    def add(self, number: int, length: int) -> None:
        self.alive.append(self.wants.add(self.chains[number][:length]))

    @precondition(lambda self: self.alive)
    @rule(number=st.integers(0, 99))
    def remove(self, number: int) -> None:
        want = self.alive.pop(number % len(self.alive))
        self.wants.remove(want)
        self.wants.remove(want)

    @rule(number=st.integers(0, 2), page=st.integers(0, 5))
    def come_or_go(self, number: int, page: int) -> None:
        key = self.chains[number][page]
        if key in self.marked.resident:
            self.marked.resident.remove(key)
        else:
            self.marked.resident.add(key)
            self.wants.arrived(key)

    @invariant()
    def agree(self) -> None:
        self.wants.check_integrity()
        assert len(self.marked.marks) == self.wants.marked <= self.limit
        assert self.wants.room == self.limit - self.wants.marked
        assert self.marked.marks == {key for want in self.alive for key in want.keys[: want.taken]}
        for want in self.alive:  # whoever has less than all lacks a page, or the room
            if want.taken < len(want.keys) and want.keys[want.taken] in self.marked.resident:
                came_and_went = want.keys[want.taken] in self.wants._awaiting
                assert self.wants.marked == self.limit or came_and_went


TestWants = WantsMachine.TestCase
TestWants.settings = settings(max_examples=80, stateful_step_count=40, derandomize=True, database=None, deadline=None)


def test_who_came_first_is_served_first_and_the_next_moves_up() -> None:
    marked = Marked()
    wants = Wants([marked], 5)
    a, b, c = (chain(name, 3) for name in "abc")
    marked.resident.update(a + b + c)
    first, second, third = wants.add(a), wants.add(b), wants.add(c)
    assert (first.taken, second.taken, third.taken) == (3, 2, 0)
    wants.remove(first)
    assert (second.taken, third.taken) == (3, 2)
    assert marked.marks == {*b, *c[:2]}


def _flood(driver: EngineDriver, name: str, jobs: int = 8) -> None:
    for number in range(jobs):
        keys = chain(f"{name}{number}", 4)
        driver.store(keys)
        driver.release(driver.prefetch(keys))


def test_an_expected_prefix_stays_until_it_is_asked_for() -> None:
    driver = EngineDriver(kv_model(), [20])
    keys = chain("a", 6)
    driver.store(keys)
    driver.release(driver.prefetch(keys))
    expected = driver.engine.expect("m", keys, 0, 60.0, driver.now)
    assert expected is not None
    assert expected.marked == 6
    _flood(driver, "f")
    job = driver.prefetch(keys)
    assert (job.host, driver.engine.expectations.knows(expected.id)) == (6, False)
    driver.release(job)
    _flood(driver, "g")
    driver.check()


def test_an_expectation_ends_with_its_time_and_when_it_is_dropped() -> None:
    driver = EngineDriver(kv_model(), [20])
    keys = chain("a", 6)
    driver.store(keys)
    driver.release(driver.prefetch(keys))
    expect = driver.engine.expect
    short, long = expect("m", keys, 0, 5.0, driver.now), expect("m", keys[:3], 0, 50.0, driver.now)
    assert short is not None
    assert long is not None
    assert driver.pool.wants.marked == 6
    driver.advance(5.0)
    assert driver.pool.wants.marked == 3
    driver.engine.expectations.drop(long.id, tenant=1)  # not its own
    assert driver.pool.wants.marked == 3
    driver.engine.expectations.drop(long.id, tenant=0)
    driver.engine.expectations.drop(long.id)
    assert (driver.pool.wants.marked, len(driver.engine.expectations)) == (0, 0)
    assert expect("m", keys, 6, 5.0, driver.now) is None
    driver.engine.stop_all(driver.now)
    with pytest.raises(StoppingError):
        expect("m", keys, 0, 5.0, driver.now)


def test_pages_that_come_after_they_were_expected_are_kept_too() -> None:
    driver = EngineDriver(kv_model(), [20])
    keys = chain("a", 6)
    driver.store(keys)
    expected = driver.engine.expect("m", [*keys, *chain("z", 8, keys)[6:]], 0, 60.0, driver.now)
    assert expected is not None
    assert expected.marked == 0
    driver.release(driver.prefetch(keys))  # only a part of what is expected: it goes on being expected
    assert expected.marked == 6
    _flood(driver, "f")
    assert driver.resident() >= set(keys)


def test_no_more_than_four_fifths_of_the_pool_is_marked() -> None:
    driver = EngineDriver(kv_model(), [20])
    keys = chain("a", 20)
    driver.store(keys)
    driver.release(driver.prefetch(keys))
    expected = driver.engine.expect("m", keys, 0, 60.0, driver.now)
    assert expected is not None
    assert (expected.marked, driver.pool.wants.room) == (16, 0)
    _flood(driver, "f")
    assert driver.resident() >= set(keys[:16])
    driver.check()


def test_what_a_queued_job_will_ask_for_is_evicted_last() -> None:
    driver = EngineDriver(kv_model(), [20], EngineSettings(budget_bytes=256 * 12))
    keys = chain("a", 6)
    driver.store([*keys, *chain("z", 8, keys)])
    driver.release(driver.prefetch(keys))
    big, later = chain("b", 12), chain("c", 9)
    driver.store([*big, *later])
    running = driver.submit(big)
    queued = driver.submit(chain("z", 8, keys))
    assert queued.state is JobState.QUEUED
    assert (queued.want is not None, driver.pool.wants.marked) == (True, 6)
    driver.answer_probes()
    driver.check()
    assert driver.resident() >= set(keys)
    driver.run()
    assert (running.done, queued.done, queued.host) == (True, True, 6)
    assert (queued.want, len(driver.pool.wants)) == (None, 0)
    again = driver.submit(chain("d", 12))
    other = driver.submit(chain("e", 3))
    assert (again.state, other.state) == (JobState.PROBING, JobState.QUEUED)
    driver.engine.stop(other, Reason.CANCELLED, driver.now)
    assert len(driver.pool.wants) == 0


def test_more_pages_than_may_be_expected_are_refused_with_nothing_taken() -> None:
    driver = EngineDriver(kv_model(), [20])
    timers = Timers()  # type: ignore[var-annotated]
    expectations = Expectations({"m": driver.pool}, 100.0, timers, max_pages=10)
    first = expectations.add("m", chain("a", 6), 1000.0, 0.0)
    assert first.expires_at == 100.0
    with pytest.raises(CapacityError):
        expectations.add("m", chain("b", 5), 1.0, 0.0)
    expectations.check_integrity()
    expectations.drop(first.id)
    assert (len(expectations), len(timers), len(driver.pool.wants)) == (0, 0, 0)
    assert list(expectations) == []
