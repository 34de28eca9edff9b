"""Which page is read next: by priority; then tenants, and the jobs of each, take turns by the bytes they were served.

Law: a load is handed out only while it is reserved and wanted, and never twice at once. Each job's loads come in prefix
order. Among tenants of one priority the least served goes first, and so among the jobs of each; who is new starts level
with the least served one, so a small job passes a large one after at most one batch, neither starves, and a tenant has
no more of the readers for asking in more jobs. Pages put in front go before everything.
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
    """The loads of one job; it has exactly one turn in its group while it has loads."""

    job: Job
    served: int
    loads: deque[Load] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class _Group:
    """The lines of one tenant at one priority; it has exactly one turn in the queue while it has lines.

    `level` is what the least served of them was served, in bytes, and `served` what they were together.
    """

    rank: "_Rank"
    priority: int
    served: int
    lines: int = 0
    level: int = 0
    turns: list[tuple[int, int, _Line]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Rank:
    """The groups of one priority, by tenant; `level` is what the least served of them was served, in bytes."""

    level: int = 0
    groups: dict[int, _Group] = field(default_factory=dict)


class ReadQueue:
    """Loads that wait for a reader, by job. Loads that several jobs want stand in the line of each."""

    def __init__(self) -> None:
        self._lines: dict[Job, _Line] = {}
        self._ranks: dict[int, _Rank] = {}
        self._front: dict[Job, deque[Load]] = {}
        self._turns: list[tuple[int, int, int, _Group]] = []
        self._num_groups = 0
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
            group = self._group(job)
            group.lines += 1
            line = self._lines[job] = _Line(job, group.level)
            self._push_line(group, line)
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
            group = self._ranks[job.request.priority].groups[job.tenant]
            self._close_line(group, job)
            if len(group.turns) > 2 * group.lines + 16:
                group.turns = [turn for turn in group.turns if self._lines.get(turn[2].job) is turn[2]]
                heapq.heapify(group.turns)

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
            _, served, _, group = heapq.heappop(self._turns)
            if not group.lines:
                continue  # all have left
            group.rank.level = max(group.rank.level, served)
            lent = self._from_group(group, batch_bytes)
            if group.lines:
                self._push_group(group)
            if lent is not None:
                return lent
        return None

    def _from_group(self, group: _Group, batch_bytes: int) -> tuple[ModelLayout, list[Load]] | None:
        while group.turns:
            served, _, line = heapq.heappop(group.turns)
            job = line.job
            if self._lines.get(job) is not line:
                continue  # it has left
            group.level = max(group.level, served)
            batch: dict[Load, None] = {}
            taken = _take(job, line.loads, batch, batch_bytes)
            line.served += taken
            group.served += taken
            if line.loads:
                self._push_line(group, line)
            else:
                del self._lines[job]
                self._close_line(group, job)
            if batch:
                return job.layout, list(batch)
        return None

    def _group(self, job: Job) -> _Group:
        rank = self._ranks.setdefault(job.request.priority, _Rank())
        group = rank.groups.get(job.tenant)
        if group is None:
            group = rank.groups[job.tenant] = _Group(rank, job.request.priority, rank.level)
            self._num_groups += 1
            self._push_group(group)
        return group

    def _push_group(self, group: _Group) -> None:
        heapq.heappush(self._turns, (-group.priority, group.served, self._sequence, group))
        self._sequence += 1

    def _push_line(self, group: _Group, line: _Line) -> None:
        heapq.heappush(group.turns, (line.served, self._sequence, line))
        self._sequence += 1

    def _close_line(self, group: _Group, job: Job) -> None:
        group.lines -= 1
        if not group.lines:
            del group.rank.groups[job.tenant]
            if not group.rank.groups:
                del self._ranks[group.priority]
            self._num_groups -= 1
            if len(self._turns) > 2 * self._num_groups + 16:
                self._turns = [turn for turn in self._turns if turn[3].lines]
                heapq.heapify(self._turns)


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
