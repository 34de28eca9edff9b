"""Things to do at a time: a heap that never runs by itself.

Law: entries come out in the order of their times, and in the order they were put in for equal times.
"""

import heapq
from typing import Generic, TypeVar

__all__ = ["Timers"]

T = TypeVar("T")


class Timers(Generic[T]):
    """Pending items by time in seconds. An item cannot be taken back: whoever gets it asks whether it still applies."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, when: float, item: T) -> None:
        heapq.heappush(self._heap, (when, self._sequence, item))
        self._sequence += 1

    def next_time(self) -> float | None:
        """Return when the first item is due, None if there is none."""
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> T | None:
        """Take the first item that is due, None if none is."""
        if self._heap and self._heap[0][0] <= now:
            return heapq.heappop(self._heap)[2]
        return None
