"""Time and waiting lines of a discrete-event simulation.

Law: events run in order of time, those of one moment in the order in which they were put; a station has at most
`servers` at work, serves in order of arrival, and `taken == served + waiting + at work`.
"""

import heapq
from collections import deque
from collections.abc import Callable

__all__ = ["Clock", "Station"]

Then = Callable[[], None]


class Clock:
    """What is due when. `now` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Then]] = []
        self._number = 0

    def after(self, seconds: float, then: Then) -> None:
        """Call something so many seconds from now."""
        self._number += 1
        heapq.heappush(self._due, (self.now + seconds, self._number, then))

    def run(self, until: float) -> None:
        """Let everything happen that is due by then."""
        due, pop = self._due, heapq.heappop
        while due and due[0][0] <= until:
            self.now, _, then = pop(due)
            then()
        self.now = until


class Station:
    """A resource that works on so many things at once: a thread, cores, a link.

    With `inside`, whoever is served here does its work there, and has both until it is done: a thread on shared cores.
    """

    def __init__(self, clock: Clock, servers: int = 1, inside: "Station | None" = None) -> None:
        self._clock = clock
        self._idle = servers
        self._line: deque[tuple[float, Then]] = deque()
        self._inside = inside
        self.servers = servers
        self.busy_s = 0.0  # of all servers, whole services that have begun
        self.taken = 0
        self.served = 0

    @property
    def waiting(self) -> int:
        """How many have come and are not being served yet."""
        return len(self._line)

    def serve(self, seconds: float, then: Then) -> None:
        """Work for so many seconds as soon as it is this one's turn, then call something."""
        self.taken += 1
        if self._idle:
            self._idle -= 1
            self._begin(seconds, then)
        else:
            self._line.append((seconds, then))

    def _begin(self, seconds: float, then: Then) -> None:
        self.busy_s += seconds

        def end() -> None:
            self.served += 1
            if self._line:
                self._begin(*self._line.popleft())
            else:
                self._idle += 1
            then()

        if self._inside is None:
            self._clock.after(seconds, end)
        else:
            self._inside.serve(seconds, end)

    def check_integrity(self) -> None:
        """Raise RuntimeError when the law does not hold."""
        at_work = self.servers - self._idle
        if self.taken != self.served + self.waiting + at_work or (self._line and self._idle):
            raise RuntimeError(f"{self.taken} taken, {self.served} served, {self.waiting} wait, {at_work} at work")
