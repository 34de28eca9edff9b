"""Which page is read next: jobs take turns by priority, then by the bytes they were served.

Law: a load is handed out only while it is reserved and wanted. Each job's loads come in prefix order. Among
jobs of one priority the least served goes first, and a new job starts level with the least served one, so a small
job passes a large one after at most one batch, and neither starves.
"""

import heapq
from collections import deque
from collections.abc import Iterable

from forestage.core.job import Job
from forestage.core.layout import ModelLayout
from forestage.core.loads import Load

__all__ = ["ReadQueue"]

_URGENT = -(1 << 62)  # before any priority


class ReadQueue:
    """Loads that wait for a reader, by job. Loads that several jobs want stand in the line of each."""

    def __init__(self) -> None:
        self._lines: dict[Job, deque[Load]] = {}
        self._turns: list[tuple[int, int, int, Job]] = []
        self._sequence = 0
        self._level = 0  # bytes served to the least served job so far

    def add(self, job: Job, loads: Iterable[Load], *, in_front: bool = False) -> None:
        """Append loads to a job's line.

        `in_front` is for what must not wait its turn: pages handed out before, and the last read of a job that ends.
        """
        line = self._lines.get(job)
        if line is None:
            line = self._lines[job] = deque()
            self._push(job, self._level)
        if in_front:
            # A second turn does no harm: whoever finds the line gone skips it.
            heapq.heappush(self._turns, (_URGENT, 0, self._sequence, job))
            self._sequence += 1
            line.extendleft(reversed(list(loads)))
        else:
            line.extend(loads)

    def remove(self, job: Job) -> None:
        """Forget a job's line. Idempotent."""
        self._lines.pop(job, None)

    def next_batch(self, batch_bytes: int) -> tuple[ModelLayout, list[Load]] | None:
        """Take the next loads of one job, about `batch_bytes` of slots but at least one; None if nothing waits."""
        while self._turns:
            _, served, _, job = heapq.heappop(self._turns)
            line = self._lines.get(job)
            if line is None:
                continue
            self._level = max(self._level, served)
            batch: list[Load] = []
            taken = 0
            components = job.layout.components
            while line and taken < batch_bytes:
                load = line.popleft()
                # Handed out in another job's turn, or not wanted any more.
                if not load.filling and job in load.subscribers:
                    batch.append(load)
                    taken += components[load.component].slot_bytes
            if line:
                self._push(job, served + taken)
            else:
                del self._lines[job]
            if batch:
                return job.layout, batch
        return None

    def _push(self, job: Job, served: int) -> None:
        heapq.heappush(self._turns, (-job.request.priority, served, self._sequence, job))
        self._sequence += 1
