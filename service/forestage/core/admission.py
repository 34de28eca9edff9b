"""Who may start: a budget of bytes promised to running jobs, and one queue for the rest.

Law: `promised` is the sum over running jobs; a job is running, waiting, or neither; while jobs wait, the first of
them does not fit. The queue is ordered by priority (higher first); among equals tenants take turns, by the bytes that
they were granted while jobs waited; a tenant's own jobs go by deadline, then arrival. It is not overtaken: a large job
at its head is not starved by small ones behind it. A job that needs no bytes does not wait. Places of the queue are
promised as the pool is: a tenant can always have its `min_share` of them.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from forestage.core.errors import CapacityError
from forestage.core.job import Job
from forestage.core.tenants import TenantShare

__all__ = ["Admission"]

_Entry = tuple[float, int, Job]


@dataclass(slots=True, eq=False)
class _Rank:
    """The waiting jobs of one priority, a heap for each tenant; `granted` counts bytes as long as any wait."""

    lines: dict[int, list[_Entry]] = field(default_factory=dict)
    granted: dict[int, int] = field(default_factory=dict)

    def first(self) -> _Entry:
        granted = self.granted
        _, line = min(self.lines.items(), key=lambda item: (granted[item[0]], item[1][0]))
        return line[0]


class Admission:
    """Byte budget and queue. `retry_after_s` is what a refused caller is told; `shares` are by tenant."""

    def __init__(
        self,
        budget_bytes: int,
        queue_limit: int,
        retry_after_s: float = 1.0,
        shares: Sequence[TenantShare] = (),
    ) -> None:
        self.budget_bytes = budget_bytes
        self.queue_limit = queue_limit
        self._retry_after_s = retry_after_s
        self._promises: dict[Job, int] = {}
        self._waiting: dict[Job, int] = {}
        self._ranks: dict[int, _Rank] = {}
        self._first: Job | None = None  # None: not known, or nobody waits
        self._entries = 0
        self._sequence = 0
        self._places = [share.minimum(queue_limit) for share in shares] or [0]
        self._waiting_of = [0] * len(self._places)
        self.promised = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._promises)

    def offer(self, job: Job, need_bytes: int) -> bool:
        """Start a job (True) or queue it (False). Raises CapacityError, with nothing taken, when the queue is full."""
        if need_bytes == 0 or (not self._waiting and self._fits(need_bytes)):
            self._start(job, need_bytes)
            return True
        taken = self._places_taken(job.tenant)
        if taken >= self.queue_limit:
            raise CapacityError(
                f"{len(self._waiting)} prefetches are waiting already", retry_after_s=self._retry_after_s
            )
        self._waiting[job] = need_bytes
        self._waiting_of[job.tenant] += 1
        self._line_up(job)
        return False

    def _places_taken(self, tenant: int) -> int:
        """Return how many places of the queue a tenant cannot have: others wait there, or are promised them."""
        others = sum(map(max, self._waiting_of, self._places))
        return others - max(0, self._places[tenant] - self._waiting_of[tenant])

    def _line_up(self, job: Job) -> None:
        rank = self._ranks.setdefault(job.request.priority, _Rank())
        line = rank.lines.get(job.tenant)
        if line is None:
            # Whoever comes anew starts level with the least served, or it would catch up on times it did not wait in.
            level = min((rank.granted[tenant] for tenant in rank.lines), default=0)
            rank.granted[job.tenant] = max(level, rank.granted.get(job.tenant, 0))
            line = rank.lines[job.tenant] = []
        deadline = math.inf if job.deadline is None else job.deadline
        heapq.heappush(line, (deadline, self._sequence, job))
        self._sequence += 1
        self._entries += 1
        self._first = None

    def first_waiting(self) -> Job | None:
        """Return the job whose turn is next, None if nobody waits."""
        if self._first is None and self._waiting:
            self._first = self._ranks[max(self._ranks)].first()[2]
        return self._first

    def lower(self, job: Job, need_bytes: int) -> bool:
        """Replace the estimate of a waiting job by a lower one; say whether it was lower."""
        if need_bytes >= self._waiting[job]:
            return False
        self._waiting[job] = need_bytes
        return True

    def next_job(self) -> Job | None:
        """Start the first waiting job if it fits now, and return it."""
        job = self.first_waiting()
        if job is None:
            return None
        need_bytes = self._waiting[job]
        if need_bytes and not self._fits(need_bytes):
            return None
        self._ranks[job.request.priority].granted[job.tenant] += need_bytes
        self._stop_waiting(job)
        self._start(job, need_bytes)
        return job

    def set_promise(self, job: Job, need_bytes: int) -> None:
        """Replace the estimate of a running job by what its grant really reserved."""
        self.promised += need_bytes - self._promises[job]
        self._promises[job] = need_bytes

    def promised_to(self, job: Job) -> int:
        """Return the bytes promised to a job, 0 if it is not running."""
        return self._promises.get(job, 0)

    def add_promise(self, job: Job, need_bytes: int) -> None:
        """A running job takes over reads that another one began."""
        self._promises[job] += need_bytes
        self.promised += need_bytes

    def leave(self, job: Job) -> None:
        """A job has ended, waiting or running. Idempotent."""
        self.promised -= self._promises.pop(job, 0)
        if job in self._waiting:
            self._stop_waiting(job)

    def _stop_waiting(self, job: Job) -> None:
        del self._waiting[job]
        self._waiting_of[job.tenant] -= 1
        self._first = None
        rank = self._ranks[job.request.priority]
        self._drop_heads(rank, job.tenant)
        if not rank.lines:
            del self._ranks[job.request.priority]
        if self._entries > 2 * len(self._waiting) + 16:
            self._drop_all_that_left()

    def _drop_heads(self, rank: _Rank, tenant: int) -> None:
        """Keep the law that the head of every line waits, so that `first` need not look behind it."""
        line = rank.lines[tenant]
        while line and line[0][2] not in self._waiting:
            heapq.heappop(line)
            self._entries -= 1
        if not line:
            del rank.lines[tenant]

    def _drop_all_that_left(self) -> None:
        """Do not keep those that left until their turn would have come."""
        for rank in self._ranks.values():
            for tenant, line in rank.lines.items():
                rank.lines[tenant] = [entry for entry in line if entry[2] in self._waiting]
                heapq.heapify(rank.lines[tenant])
        self._entries = len(self._waiting)

    def _fits(self, need_bytes: int) -> bool:
        # One job alone may take the whole pool.
        return not self.promised or self.promised + need_bytes <= self.budget_bytes

    def _start(self, job: Job, need_bytes: int) -> None:
        self._promises[job] = need_bytes
        self.promised += need_bytes

    def check_integrity(self) -> None:
        if self.promised != sum(self._promises.values()):
            raise RuntimeError(f"promised {self.promised}, running jobs add up to {sum(self._promises.values())}")
        if self._promises.keys() & self._waiting.keys():
            raise RuntimeError("a job runs and waits at once")
        lines = [
            (priority, tenant, line) for priority, rank in self._ranks.items() for tenant, line in rank.lines.items()
        ]
        queued = [(priority, tenant, job) for priority, tenant, line in lines for _, _, job in line]
        if len(queued) != self._entries or any(line[0][2] not in self._waiting for _, _, line in lines):
            raise RuntimeError(f"{len(queued)} entries, counted {self._entries}, or a head that does not wait")
        waiting = [(job.request.priority, job.tenant, job) for job in self._waiting]
        if any(entry not in queued for entry in waiting) or sum(self._waiting_of) != len(waiting):
            raise RuntimeError(f"{len(waiting)} jobs wait, {self._waiting_of} by tenant")
        first = self.first_waiting()
        if first is not None and self._fits(self._waiting[first]):
            raise RuntimeError("the first waiting job fits, and waits")
