"""The circuit breaker before L3: after enough failures in a row, refuse at once instead of asking again.

Law: closed with fewer than `max_failures` counted failures, or open with a time to try again; a trial runs only while
not closed, and never more than one; the backoff lies between `backoff_s` and `backoff_cap_s`.
"""

from enum import StrEnum
from typing import NamedTuple

__all__ = ["Breaker", "BreakerState", "Ticket"]


class BreakerState(StrEnum):
    """What the breaker does with the next call."""

    CLOSED = "closed"  # let it pass
    OPEN = "open"  # refuse it
    HALF_OPEN = "half_open"  # let one pass as a trial, or wait for the one that is running


class Ticket(NamedTuple):
    """The answer to one call that wants to pass; `trial` is the number of the trial that it is, 0 if it is none."""

    passed: bool
    trial: int = 0


class Breaker:
    """Counts failures of L3 as a whole; what is wrong with one page does not belong here.

    Every method takes `now` in seconds of a monotonic clock.
    """

    def __init__(self, *, max_failures: int = 3, backoff_s: float = 0.25, backoff_cap_s: float = 5.0) -> None:
        """Start closed.

        Args:
            max_failures: so many failures in a row open the breaker.
            backoff_s: how long it stays open the first time; doubled with every trial that fails.
            backoff_cap_s: the longest it ever stays open before the next trial.
        """
        if max_failures < 1 or not 0 < backoff_s <= backoff_cap_s:
            raise ValueError("want max_failures >= 1 and 0 < backoff_s <= backoff_cap_s")
        self._max_failures = max_failures
        self._first_backoff_s = backoff_s
        self._backoff_cap_s = backoff_cap_s
        self._backoff_s = backoff_s
        self._failures = 0
        self._retry_at: float | None = None
        self._num_trials = 0
        self._trial = 0

    def state(self, now: float) -> BreakerState:
        """Say what the next call would meet; changes nothing."""
        if self._retry_at is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._retry_at else BreakerState.HALF_OPEN

    def retry_after_s(self, now: float) -> float:
        """Return the seconds until a trial may pass, 0 when it is not open."""
        return 0.0 if self._retry_at is None else max(0.0, self._retry_at - now)

    def admit(self, now: float) -> Ticket:
        """Let a call pass, let it pass as the one trial, or refuse it.

        Whoever passed calls `succeed`, `fail` or `abandon` in the end; for one that was no trial `abandon` may be
        left out.
        """
        state = self.state(now)
        if state is BreakerState.CLOSED:
            return Ticket(passed=True)
        if state is BreakerState.OPEN or self._trial:
            return Ticket(passed=False)
        self._num_trials += 1
        self._trial = self._num_trials
        return Ticket(passed=True, trial=self._trial)

    def succeed(self, *, firm: bool = True) -> None:
        """Take note that L3 answered, to whatever call: the breaker closes.

        A success that is not `firm` (the existence of keys was answered while reads keep failing) closes it on
        probation: the next failure opens it at once, for the longer backoff; in a closed breaker it changes nothing.
        """
        if firm:
            self._failures = 0
            self._backoff_s = self._first_backoff_s
        elif self._retry_at is not None:
            self._failures = self._max_failures - 1
        self._retry_at = None
        self._trial = 0

    def fail(self, now: float, ticket: Ticket) -> None:
        """Take note that L3 as a whole did not answer a call.

        Late failures of calls that passed before the breaker opened do not lengthen its backoff.
        """
        if self._retry_at is None:
            self._failures += 1
            if self._failures >= self._max_failures:
                self._open(now)
        elif self._is_running(ticket):
            self._open(now)

    def abandon(self, ticket: Ticket) -> None:
        """End a call without a verdict (cancelled, or it said nothing about L3): if a trial, the next call may try."""
        if self._is_running(ticket):
            self._trial = 0

    def _is_running(self, ticket: Ticket) -> bool:
        return ticket.trial != 0 and ticket.trial == self._trial

    def _open(self, now: float) -> None:
        self._failures = 0
        self._trial = 0
        self._retry_at = now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, self._backoff_cap_s)

    def check_integrity(self) -> None:
        """Raise AssertionError when the law does not hold."""
        if not 0 <= self._failures < self._max_failures:
            raise AssertionError(f"{self._failures} failures counted, limit {self._max_failures}")
        if self._retry_at is None and self._trial:
            raise AssertionError("a trial runs although the breaker is closed")
        if not self._first_backoff_s <= self._backoff_s <= self._backoff_cap_s:
            raise AssertionError(f"backoff {self._backoff_s} outside its bounds")
