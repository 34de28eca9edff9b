"""Who may start: a budget of bytes promised to running jobs, and one queue for the rest.

Law: `promised` is the sum over running jobs; a job is running, waiting, or neither; while jobs wait, the first of
them does not fit. The queue is ordered by priority (higher first), then deadline, then arrival, and is not overtaken:
a large job at its head is not starved by small ones behind it. A job that needs no bytes does not wait.
"""

import heapq
import math

from forestage.core.errors import CapacityError
from forestage.core.job import Job

__all__ = ["Admission"]


class Admission:
    """Byte budget and queue. `retry_after_s` is what a refused caller is told."""

    def __init__(self, budget_bytes: int, queue_limit: int, retry_after_s: float = 1.0) -> None:
        self.budget_bytes = budget_bytes
        self.queue_limit = queue_limit
        self._retry_after_s = retry_after_s
        self._promises: dict[Job, int] = {}
        self._waiting: dict[Job, int] = {}
        self._order: list[tuple[int, float, int, Job]] = []
        self._sequence = 0
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
        if len(self._waiting) >= self.queue_limit:
            raise CapacityError(
                f"{len(self._waiting)} prefetches are waiting already", retry_after_s=self._retry_after_s
            )
        self._waiting[job] = need_bytes
        deadline = math.inf if job.deadline is None else job.deadline
        heapq.heappush(self._order, (-job.request.priority, deadline, self._sequence, job))
        self._sequence += 1
        return False

    def first_waiting(self) -> Job | None:
        """Return the job whose turn is next, None if nobody waits."""
        while self._order and self._order[0][3] not in self._waiting:
            heapq.heappop(self._order)  # withdrawn
        return self._order[0][3] if self._order else None

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
        heapq.heappop(self._order)
        del self._waiting[job]
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
        if self._waiting.pop(job, None) is not None and len(self._order) > 2 * len(self._waiting) + 16:
            # Do not keep those that left until their turn would have come.
            self._order = [entry for entry in self._order if entry[3] in self._waiting]
            heapq.heapify(self._order)

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
        queue = [job for _, _, _, job in sorted(self._order) if job in self._waiting]
        if len(queue) != len(self._waiting):
            raise RuntimeError(f"{len(self._waiting)} jobs wait, {len(queue)} of them in the queue")
        if queue and self._fits(self._waiting[queue[0]]):
            raise RuntimeError("the first waiting job fits, and waits")
