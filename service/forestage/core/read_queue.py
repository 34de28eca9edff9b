"""Which page is read next: jobs take turns by priority, then by the bytes they were served.

Law: a load is handed out only while it is reserved and wanted, and never twice at once. Each job's loads come in prefix
order. Among jobs of one priority the least served goes first, and a new job starts level with the least served one, so
a small job passes a large one after at most one batch, and neither starves. Pages put in front go before everything.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from forestage.core.job import Job
from forestage.core.layout import ModelLayout
from forestage.core.loads import Load

__all__ = ["ReadQueue"]


@dataclass(slots=True, eq=False)
class _Line:
    """The loads of one job; it has exactly one turn while it has loads."""

    job: Job
    served: int
    loads: deque[Load] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class _Rank:
    """The lines of one priority; `level` is what the least served of them was served, in bytes."""

    lines: int = 0
    level: int = 0


class ReadQueue:
    """Loads that wait for a reader, by job. Loads that several jobs want stand in the line of each."""

    def __init__(self) -> None:
        self._lines: dict[Job, _Line] = {}
        self._ranks: dict[int, _Rank] = {}
        self._front: dict[Job, deque[Load]] = {}
        self._turns: list[tuple[int, int, int, _Line]] = []
        self._sequence = 0

    def __len__(self) -> int:
        """Return how many loads stand in line, counting one for each job that wants it."""
        return sum(map(len, self._front.values())) + sum(len(line.loads) for line in self._lines.values())

    def add(self, job: Job, loads: Iterable[Load]) -> None:
        """Append loads to a job's line."""
        loads = deque(loads)
        if not loads:
            return
        line = self._lines.get(job)
        if line is None:
            rank = self._ranks.setdefault(job.request.priority, _Rank())
            rank.lines += 1
            line = self._lines[job] = _Line(job, rank.level)
            self._push(line)
        line.loads += loads

    def add_in_front(self, job: Job, loads: Iterable[Load]) -> None:
        """Put loads before everything: pages handed out before, and the last read of a job that ends."""
        loads = deque(loads)
        if loads:
            self._front.setdefault(job, deque()).extend(loads)

    def remove(self, job: Job) -> None:
        """Forget a job. Idempotent."""
        self._front.pop(job, None)
        line = self._lines.pop(job, None)
        if line is not None:
            self._close(line)
            if len(self._turns) > 2 * len(self._lines) + 16:
                self._turns = [turn for turn in self._turns if self._lines.get(turn[3].job) is turn[3]]
                heapq.heapify(self._turns)

    def next_batch(self, batch_bytes: int) -> tuple[ModelLayout, list[Load]] | None:
        """Take about `batch_bytes` of slots, at least one load: what was put in front, else the next of one job.

        None if nothing waits.
        """
        return self._from_front(batch_bytes) or self._from_lines(batch_bytes)

    def _from_front(self, batch_bytes: int) -> tuple[ModelLayout, list[Load]] | None:
        batch: dict[Load, None] = {}
        layout: ModelLayout | None = None
        taken = 0
        while self._front and (not batch or taken < batch_bytes):
            job, loads = next(iter(self._front.items()))
            if batch and job.layout is not layout:
                break
            layout = job.layout
            taken += _take(job, loads, batch, batch_bytes - taken)
            if not loads:
                del self._front[job]
        return (layout, list(batch)) if layout is not None and batch else None

    def _from_lines(self, batch_bytes: int) -> tuple[ModelLayout, list[Load]] | None:
        while self._turns:
            _, served, _, line = heapq.heappop(self._turns)
            job = line.job
            if self._lines.get(job) is not line:
                continue  # it has left
            rank = self._ranks[job.request.priority]
            rank.level = max(rank.level, served)
            batch: dict[Load, None] = {}
            line.served += _take(job, line.loads, batch, batch_bytes)
            if line.loads:
                self._push(line)
            else:
                del self._lines[job]
                self._close(line)
            if batch:
                return job.layout, list(batch)
        return None

    def _push(self, line: _Line) -> None:
        heapq.heappush(self._turns, (-line.job.request.priority, line.served, self._sequence, line))
        self._sequence += 1

    def _close(self, line: _Line) -> None:
        priority = line.job.request.priority
        self._ranks[priority].lines -= 1
        if not self._ranks[priority].lines:
            del self._ranks[priority]


def _take(job: Job, loads: deque[Load], batch: dict[Load, None], batch_bytes: int) -> int:
    """Move loads that are still to be read into a batch, at least one if there is one; return their bytes.

    Left out is what was handed out in another job's turn, what was left meanwhile, and what is in the batch already.
    """
    taken = 0
    components = job.layout.components
    while loads and (not batch or taken < batch_bytes):
        load = loads.popleft()
        if not load.filling and job in load.subscribers and load not in batch:
            batch[load] = None
            taken += components[load.component].slot_bytes
    return taken
