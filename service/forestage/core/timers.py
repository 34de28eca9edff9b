"""Things to do at a time: a heap that never runs by itself.

Law: entries come out in the order of their times, and in the order they were put in for equal times. What was taken
back never comes out, and no more than about as many dead entries are kept as there are live ones.
"""

import heapq
from typing import Generic, TypeVar

__all__ = ["Timers"]

T = TypeVar("T")


class Timers(Generic[T]):
    """Pending items by time in seconds."""

    def __init__(self) -> None:
        self._items: dict[int, T] = {}
        self._heap: list[tuple[float, int]] = []
        self._next_ticket = 1

    def __len__(self) -> int:
        return len(self._items)

    def put(self, when: float, item: T) -> int:
        """Add an item and return its ticket, for taking it back; tickets are never 0 and never used twice."""
        ticket = self._next_ticket
        self._next_ticket += 1
        self._items[ticket] = item
        heapq.heappush(self._heap, (when, ticket))
        return ticket

    def take_back(self, ticket: int) -> None:
        """Forget an item, and let go of it at once; nothing happens if it has come out already, or for ticket 0."""
        if self._items.pop(ticket, None) is not None and len(self._heap) > 2 * len(self._items) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._items]
            heapq.heapify(self._heap)

    def next_time(self) -> float | None:
        """Return when the first item is due, None if there is none."""
        while self._heap and self._heap[0][1] not in self._items:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> T | None:
        """Take the first item that is due, None if none is."""
        when = self.next_time()
        if when is None or when > now:
            return None
        return self._items.pop(heapq.heappop(self._heap)[1])
