"""Admission: the byte budget, the order of the queue, and what is refused."""

import random

import pytest

from forestage.core.admission import Admission
from forestage.core.errors import CapacityError
from forestage.core.job import Job
from support.engine_driver import job_of


def _drain(admission: Admission) -> list[str]:
    """Let everybody go one after another; return who started, in order."""
    order = []
    while admission.waiting:
        for job in [*admission._promises]:
            admission.leave(job)
        while (started := admission.next_job()) is not None:
            order.append(started.request.request_id)
    return order


def test_priority_then_deadline_then_arrival() -> None:
    admission = Admission(100, 10)
    assert admission.offer(job_of("running"), 100)
    for name, priority, deadline_ms in [
        ("late", 0, 900),
        ("never", 0, 0),
        ("soon", 0, 100),
        ("soon too", 0, 100),
        ("low", -1, 1),
        ("high", 1, 0),
    ]:
        assert not admission.offer(job_of(name, priority=priority, deadline_ms=deadline_ms), 60)
    assert admission.waiting == 6
    assert _drain(admission) == ["high", "soon", "soon too", "late", "never", "low"]


def test_one_job_alone_may_take_more_than_the_budget() -> None:
    admission = Admission(100, 10)
    assert admission.offer(job_of("big"), 1000)
    assert not admission.offer(job_of("small"), 1)
    assert admission.promised == 1000


def test_small_jobs_do_not_overtake_a_large_one() -> None:
    admission = Admission(100, 10)
    running, large, small = job_of("running"), job_of("large"), job_of("small")
    assert admission.offer(running, 50)
    assert not admission.offer(large, 60)
    assert not admission.offer(small, 10)
    assert admission.next_job() is None
    admission.leave(running)
    assert admission.next_job() is large
    assert admission.next_job() is small
    assert admission.promised == 70


def test_a_job_that_needs_nothing_does_not_wait() -> None:
    admission = Admission(100, 0)
    assert admission.offer(job_of("running"), 100)
    assert admission.offer(job_of("resident"), 0)
    with pytest.raises(CapacityError):
        admission.offer(job_of("other"), 1)


def test_a_full_queue_refuses_and_takes_nothing() -> None:
    admission = Admission(100, 1, retry_after_s=2.5)
    running = job_of("running")
    admission.offer(running, 100)
    admission.offer(job_of("waiting"), 1)
    with pytest.raises(CapacityError) as refused:
        admission.offer(job_of("refused"), 1)
    assert (refused.value.status, refused.value.retry_after_s) == (429, 2.5)
    assert (admission.running, admission.waiting, admission.promised) == (1, 1, 100)
    admission.check_integrity()


def test_who_left_is_not_started() -> None:
    admission = Admission(100, 10)
    running, gone, next_one = job_of("running"), job_of("gone", priority=5), job_of("next")
    admission.offer(running, 100)
    admission.offer(gone, 100)
    admission.offer(next_one, 100)
    admission.leave(gone)
    admission.leave(gone)
    admission.leave(running)
    assert admission.next_job() is next_one


def test_promises_are_replaced_raised_and_given_back() -> None:
    admission = Admission(100, 10)
    one, two = job_of("one"), job_of("two")
    admission.offer(one, 30)
    admission.offer(two, 30)
    admission.set_promise(one, 10)
    admission.add_promise(two, 5)
    assert (admission.promised_to(one), admission.promised_to(two), admission.promised) == (10, 35, 45)
    admission.leave(one)
    assert (admission.promised_to(one), admission.promised) == (0, 35)
    admission.check_integrity()


def test_who_left_the_queue_is_not_kept() -> None:
    """While the head waits long, others come and go; they must not pile up behind it."""
    admission = Admission(100, 10)
    admission.offer(job_of("running"), 100)
    admission.offer(job_of("head"), 100)
    for number in range(1000):
        job = job_of(f"j{number}", 1, priority=-number)
        admission.offer(job, 1)
        admission.leave(job)
    assert admission._entries <= 20


def test_random_traffic_keeps_the_law() -> None:
    rng = random.Random(7)
    admission = Admission(100, 5)
    known: list[Job] = []
    for number in range(2000):
        if rng.random() < 0.5:
            job = job_of(f"j{number}", 1, priority=rng.randint(-1, 1), deadline_ms=rng.choice([0, 5, 50]))
            try:
                admission.offer(job, rng.choice([0, 5, 40, 90, 300]))
            except CapacityError:
                assert admission.waiting == 5
            else:
                known.append(job)
        elif known:
            admission.leave(known.pop(rng.randrange(len(known))))
        while (started := admission.next_job()) is not None:
            assert started in known
        admission.check_integrity()
        assert admission.running + admission.waiting == len(known)
        assert admission.promised <= 100 or sum(promise > 0 for promise in admission._promises.values()) == 1
    for job in known:
        admission.leave(job)
    assert (admission.promised, admission.running, admission.waiting) == (0, 0, 0)
