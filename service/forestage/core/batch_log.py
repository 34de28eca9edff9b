"""The last batches of events that were published, for those who missed some.

Law: batches have consecutive sequence numbers from 0 on; what is kept are the last ones, at most `max_batches` of them
and at most `max_bytes` of payload, unless it is a single one.
"""

from collections import deque
from itertools import islice
from typing import NamedTuple

__all__ = ["Batch", "BatchLog"]


class Batch(NamedTuple):
    """One message: its number, and what it says under which topic."""

    number: int
    topic: bytes
    payload: bytes


class BatchLog:
    """Keeps batches in order. Every operation but `since` is O(1)."""

    def __init__(self, max_batches: int, max_bytes: int = 64 << 20) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._batches: deque[Batch] = deque()
        self._bytes = 0
        self.next = 0

    @property
    def oldest(self) -> int:
        """The number of the oldest batch that is kept; `next` if none is."""
        return self.next - len(self._batches)

    def append(self, topic: bytes, payload: bytes) -> Batch:
        """Give a batch the next number and keep it; the oldest ones may go."""
        batch = Batch(self.next, topic, payload)
        self.next += 1
        self._batches.append(batch)
        self._bytes += len(payload)
        while self._batches and (
            len(self._batches) > self._max_batches or (self._bytes > self._max_bytes and len(self._batches) > 1)
        ):
            self._bytes -= len(self._batches.popleft().payload)
        return batch

    def since(self, number: int, limit: int) -> list[Batch]:
        """Return up to `limit` batches from `number` on, or from the oldest if that one is lost. O(kept)."""
        skipped = max(0, number - self.oldest)
        return list(islice(self._batches, skipped, skipped + limit))

    def check_integrity(self) -> None:
        """Recount what is kept; raise with the numbers if the law is broken."""
        numbers = [batch.number for batch in self._batches]
        if numbers != list(range(self.oldest, self.next)) or len(numbers) > self._max_batches:
            raise RuntimeError(
                f"batches {numbers[:1]} to {numbers[-1:]}, next {self.next}, at most {self._max_batches}"
            )
        recounted = sum(len(batch.payload) for batch in self._batches)
        if recounted != self._bytes or (recounted > self._max_bytes and len(numbers) > 1):
            raise RuntimeError(f"{self._bytes} bytes kept, recounted {recounted}, at most {self._max_bytes}")
