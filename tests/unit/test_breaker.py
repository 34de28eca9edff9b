"""The circuit breaker, without a clock and against a random caller."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.core.breaker import Breaker, BreakerState, Ticket

FREE = Ticket(passed=True)


def opened() -> Breaker:
    breaker = Breaker(max_failures=1, backoff_s=1.0, backoff_cap_s=8.0)
    breaker.fail(0.0, breaker.admit(0.0))
    return breaker


def test_opens_after_failures_in_a_row() -> None:
    breaker = Breaker(max_failures=3, backoff_s=1.0, backoff_cap_s=8.0)
    for now in (0.0, 0.1):
        assert breaker.admit(now).passed
        breaker.fail(now, FREE)
    assert breaker.state(0.1) is BreakerState.CLOSED
    breaker.fail(0.2, FREE)
    assert breaker.state(0.2) is BreakerState.OPEN
    assert not breaker.admit(1.1).passed
    assert breaker.retry_after_s(0.7) == pytest.approx(0.5)


def test_a_success_in_between_starts_the_count_anew() -> None:
    breaker = Breaker(max_failures=2)
    for now in range(10):
        breaker.fail(now, FREE)
        breaker.succeed()
    assert breaker.state(10) is BreakerState.CLOSED


def test_one_trial_at_a_time() -> None:
    breaker = opened()
    assert breaker.state(1.0) is BreakerState.HALF_OPEN
    trial = breaker.admit(1.0)
    assert trial.passed
    assert trial.trial
    assert not breaker.admit(1.0).passed
    breaker.succeed()
    assert breaker.admit(1.0) == FREE


def test_backoff_doubles_with_each_failed_trial_up_to_the_cap() -> None:
    breaker = opened()
    now, waits = 0.0, []
    for _ in range(6):
        wait_s = breaker.retry_after_s(now)
        waits.append(wait_s)
        now += wait_s
        breaker.fail(now, breaker.admit(now))
        breaker.check_integrity()
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    now += breaker.retry_after_s(now)
    assert breaker.admit(now).passed
    breaker.succeed()
    breaker.fail(now, FREE)
    assert breaker.retry_after_s(now) == 1.0  # a success forgets how long the outage was


def test_late_failures_of_earlier_calls_do_not_lengthen_the_backoff() -> None:
    breaker = Breaker(max_failures=1, backoff_s=1.0, backoff_cap_s=8.0)
    tickets = [breaker.admit(0.0) for _ in range(5)]
    for ticket in tickets:
        breaker.fail(0.5, ticket)
    assert breaker.retry_after_s(0.5) == 1.0
    trial = breaker.admit(1.5)
    breaker.fail(1.6, tickets[0])
    assert breaker.state(1.6) is BreakerState.HALF_OPEN
    breaker.fail(1.7, trial)
    assert breaker.retry_after_s(1.7) == 2.0


def test_an_abandoned_trial_makes_room_for_the_next() -> None:
    breaker = opened()
    trial = breaker.admit(1.0)
    breaker.abandon(FREE)
    assert not breaker.admit(1.0).passed
    breaker.abandon(trial)
    assert breaker.admit(1.0).passed


def test_an_overtaken_trial_frees_no_other() -> None:
    breaker = opened()
    old = breaker.admit(1.0)
    breaker.succeed()
    breaker.fail(1.1, FREE)
    new = breaker.admit(2.1)
    assert new.trial not in {0, old.trial}
    breaker.abandon(old)
    breaker.fail(2.1, old)
    assert not breaker.admit(2.1).passed


def test_a_success_that_is_not_firm_closes_on_probation() -> None:
    breaker = Breaker(max_failures=3, backoff_s=1.0, backoff_cap_s=8.0)
    for _ in range(3):
        breaker.fail(0.0, FREE)
    breaker.admit(1.0)
    breaker.succeed(firm=False)
    assert breaker.state(1.0) is BreakerState.CLOSED
    assert breaker.admit(1.0).passed
    breaker.fail(1.1, FREE)
    assert breaker.state(1.1) is BreakerState.OPEN
    assert breaker.retry_after_s(1.1) == 2.0


def test_a_success_that_is_not_firm_forgets_no_failures() -> None:
    breaker = Breaker(max_failures=2)
    breaker.fail(0.0, FREE)
    breaker.succeed(firm=False)
    breaker.fail(0.0, FREE)
    assert breaker.state(0.0) is BreakerState.OPEN


@pytest.mark.parametrize(("max_failures", "backoff_s", "cap_s"), [(0, 1.0, 2.0), (1, 0.0, 2.0), (1, 2.0, 1.0)])
def test_refuses_senseless_settings(max_failures: int, backoff_s: float, cap_s: float) -> None:
    with pytest.raises(ValueError, match="backoff_cap_s"):
        Breaker(max_failures=max_failures, backoff_s=backoff_s, backoff_cap_s=cap_s)


STEPS = ["admit", "succeed", "soft", "fail", "abandon"]


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.floats(0, 3)), max_size=60))
def test_the_law_holds_whatever_happens(steps: list[tuple[str, float]]) -> None:
    breaker = Breaker(max_failures=2, backoff_s=0.5, backoff_cap_s=4.0)
    now, tickets, trials = 0.0, [FREE], 0
    for step, wait_s in steps:
        now += wait_s
        match step:
            case "admit":
                before = breaker.state(now)
                ticket = breaker.admit(now)
                assert ticket.passed or before is not BreakerState.CLOSED
                assert not ticket.passed or before is not BreakerState.OPEN
                trials += ticket.trial != 0
                tickets.append(ticket)
            case "succeed" | "soft":
                breaker.succeed(firm=step == "succeed")
                assert breaker.state(now) is BreakerState.CLOSED
            case "fail":
                breaker.fail(now, tickets[-1])
            case _:
                breaker.abandon(tickets[-1])
        breaker.check_integrity()
    assert len({ticket.trial for ticket in tickets} - {0}) == trials
