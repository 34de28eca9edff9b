"""Timers: in order of time, then of arrival; what was taken back is gone."""

import random

from forestage.core.timers import Timers


def _due(timers: Timers[str], now: float) -> list[str]:
    due = []
    while (item := timers.pop_due(now)) is not None:
        due.append(item)
    return due


def test_time_then_arrival() -> None:
    timers: Timers[str] = Timers()
    for when, item in [(2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b"), (9.0, "e")]:
        timers.put(when, item)
    assert timers.next_time() == 1.0
    assert _due(timers, 0.5) == []
    assert _due(timers, 2.0) == ["a", "b", "c", "d"]
    assert (timers.next_time(), len(timers)) == (9.0, 1)
    assert _due(timers, 10.0) == ["e"]
    assert timers.next_time() is None


def test_what_was_taken_back_never_comes() -> None:
    timers: Timers[str] = Timers()
    first, second = timers.put(1.0, "first"), timers.put(2.0, "second")
    timers.take_back(first)
    timers.take_back(first)
    timers.take_back(0)
    assert timers.next_time() == 2.0
    assert _due(timers, 5.0) == ["second"]
    timers.take_back(second)
    assert len(timers) == 0


def test_an_item_put_while_others_come_out_is_due_at_once() -> None:
    timers: Timers[str] = Timers()
    timers.put(1.0, "a")
    assert timers.pop_due(3.0) == "a"
    timers.put(3.0, "b")
    assert timers.pop_due(3.0) == "b"


def test_far_timers_that_were_taken_back_are_not_kept() -> None:
    timers: Timers[str] = Timers()
    for _ in range(10_000):
        timers.take_back(timers.put(86_400.0, "deadline of a job that is done"))
    assert len(timers._heap) <= 70


def test_against_a_sorted_list() -> None:
    rng = random.Random(3)
    timers: Timers[int] = Timers()
    pending: dict[int, tuple[float, int]] = {}
    now = 0.0
    for number in range(3000):
        if rng.random() < 0.6:
            when = now + rng.choice([0.0, 1.0, 2.5, 40.0])
            pending[timers.put(when, number)] = (when, number)
        elif pending and rng.random() < 0.5:
            ticket = rng.choice(list(pending))
            timers.take_back(ticket)
            del pending[ticket]
        else:
            now += rng.random()
            due = sorted(entry for entry in pending.values() if entry[0] <= now)
            assert [timers.pop_due(now) for _ in due] == [item for _, item in due]
            assert timers.pop_due(now) is None
            pending = {ticket: entry for ticket, entry in pending.items() if entry[0] > now}
        assert timers.next_time() == min((when for when, _ in pending.values()), default=None)
