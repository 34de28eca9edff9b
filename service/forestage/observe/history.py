"""What ended and what L3 did lately: in buckets of equal time, in a few finished jobs, and in totals since the start.

Law: requested == ready + shortfall, in the totals and in each bucket. Everything here is bounded in size, whatever
happens; nothing here can fail a request.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from forestage.core.job import Job, Lengths

__all__ = ["BUCKETS", "BUCKET_S", "Bucket", "FinishedJob", "History"]

BUCKET_S = 15.0
BUCKETS = 20  # five minutes
_FINISHED = 64


@dataclass(slots=True)
class Bucket:
    """What happened in BUCKET_S seconds from `number * BUCKET_S` on. Pages and bytes."""

    number: int
    jobs: int = 0
    requested: int = 0
    ready: int = 0
    shortfall: Counter[str] = field(default_factory=Counter)
    read_bytes: int = 0
    errors: int = 0

    def add(self, job: Job) -> None:
        """Count a job that is done."""
        self.jobs += 1
        self.requested += job.requested
        self.ready += job.ready
        self.shortfall.update({reason.value: pages for reason, pages in job.shortfall.items()})

    def check_integrity(self) -> None:
        if self.requested != self.ready + self.shortfall.total():
            raise RuntimeError(f"{self.requested} pages requested, {self.ready} ready, short by {self.shortfall}")


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A job that is done, as short as a list of them needs it."""

    request_id: str
    model: str
    tenant: str
    outcome: str
    device_pages: int
    lengths: Lengths
    shortfall: dict[str, int]
    total_ms: float
    ended: float


class History:
    """The last five minutes of a service. Implements JobObserver and the storages' observer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.total = Bucket(0)
        self.outcomes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.loaded = 0
        self.joined = 0
        self.state_since = clock()
        self._buckets: deque[Bucket] = deque(maxlen=BUCKETS)
        self._finished: deque[FinishedJob] = deque(maxlen=_FINISHED)

    # ---- JobObserver

    def job_finished(self, job: Job) -> None:
        assert job.outcome is not None
        assert job.timing.done is not None
        loaded, joined = job.count_pages()
        self.loaded += loaded
        self.joined += joined
        self.outcomes[job.outcome.value] += 1
        self.total.add(job)
        self._now().add(job)
        self._finished.append(
            FinishedJob(
                job.request.request_id,
                job.layout.name,
                job.request.tenant,
                job.outcome.value,
                job.request.device_pages,
                job.lengths(),
                {reason.value: pages for reason, pages in job.shortfall.items()},
                (job.timing.done - job.timing.arrived) * 1e3,
                job.timing.done,
            )
        )

    # ---- StorageObserver

    def storage_read(self, pages: int, num_bytes: int, seconds: float) -> None:
        self.total.read_bytes += num_bytes
        self._now().read_bytes += num_bytes

    def storage_error(self, kind: str, count: int) -> None:
        self.errors[kind] += count
        self.total.errors += count
        self._now().errors += count

    def storage_up(self, is_up: bool) -> None:
        self.state_since = self.clock()

    # ---- what others ask

    def buckets(self) -> list[Bucket]:
        """Return the last BUCKETS buckets, the one that time is in last; those without events are empty."""
        newest = self._number()
        known = {bucket.number: bucket for bucket in self._buckets}
        return [known.get(number) or Bucket(number) for number in range(newest - BUCKETS + 1, newest + 1)]

    def finished(self, tenant: str | None) -> Iterator[FinishedJob]:
        """Yield the jobs that ended last, the newest first; only the tenant's if one is named."""
        return (job for job in reversed(self._finished) if tenant in {None, job.tenant})

    def _number(self) -> int:
        return int(self.clock() // BUCKET_S)

    def _now(self) -> Bucket:
        number = self._number()
        if not self._buckets or self._buckets[-1].number != number:
            self._buckets.append(Bucket(number))
        return self._buckets[-1]

    def check_integrity(self) -> None:
        """Raise RuntimeError if pages do not add up, or buckets are out of order."""
        for bucket in (self.total, *self._buckets):
            bucket.check_integrity()
        numbers = [bucket.number for bucket in self._buckets]
        if numbers != sorted(set(numbers)):
            raise RuntimeError(f"buckets out of order: {numbers}")
        if self.total.jobs != self.outcomes.total() or self.total.errors != self.errors.total():
            raise RuntimeError(f"{self.total.jobs} jobs, {self.total.errors} errors: {self.outcomes}, {self.errors}")
