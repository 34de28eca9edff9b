"""The wrapper every storage runs in: bounds probes and writes, notices stalls, keeps the breaker, and counts.

Law: whatever the inner storage does, each page of a batch is reported once, a probe ends within its timeout, and a
batch without progress, or a write that takes too long, is given up, although the call lasts until its buffers are free.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from forestage.core.breaker import Breaker, BreakerState, Ticket
from forestage.core.errors import StorageUnavailableError
from forestage.core.layout import ModelLayout
from forestage.storage.base import Buffer, PageRead, Presence, Probe, ReadOutcome, Report, Storage
from forestage.storage.faulty import FaultyStorage
from forestage.storage.write_time import WriteTime

__all__ = ["FaultyStorage", "GuardedStorage", "StorageObserver"]

_log = logging.getLogger(__name__)

# So long after a failed read the answer to a probe is no proof that reads work again.
_DISTRUST_S = 30.0
# A batch is stalled when it did not move at so many looks in a row. Several, so that a process that was itself
# stopped for a while does not take that for a stall.
_LOOKS = 4
_COUNTED = (ReadOutcome.MISSING, ReadOutcome.CORRUPT, ReadOutcome.ERROR, ReadOutcome.UNREACHABLE)


class StorageObserver(Protocol):
    """Who counts what the storage does; called on the event loop, must not raise."""

    def storage_read(self, pages: int, num_bytes: int, seconds: float) -> None:
        """A batch ended after `seconds`, with so many pages and payload bytes loaded."""

    def storage_error(self, kind: str, count: int) -> None:
        """So many pages ended as `kind` (a failing ReadOutcome), or a call did: "probe" or "write"."""

    def storage_up(self, is_up: bool) -> None:
        """L3 as a whole answers, or it does not. Called at every change."""


class _Unobserved:
    def storage_read(self, pages: int, num_bytes: int, seconds: float) -> None:
        pass

    def storage_error(self, kind: str, count: int) -> None:
        pass

    def storage_up(self, is_up: bool) -> None:
        pass


class _Batch:
    """One call of `read_into`: passes every index on once, whoever reports it first."""

    def __init__(self, reads: Sequence[PageRead], report: Report) -> None:
        self.reads = reads
        self.outcomes: list[ReadOutcome | None] = [None] * len(reads)
        self.is_stalled = False
        self.mark = 0
        self.quiet_looks = 0
        self.moves_seen = -1
        self._report = report
        self._num_reported = 0
        self._lock = threading.Lock()

    def report(self, index: int, outcome: ReadOutcome) -> None:
        """Pass a report on unless the page has had one; from any thread."""
        with self._lock:
            if self.outcomes[index] is not None:
                return
            self.outcomes[index] = outcome
            self._num_reported += 1
        self._report(index, outcome)

    def report_rest(self, outcome: ReadOutcome) -> None:
        """Report `outcome` for every page that has had no report."""
        for index in range(len(self.reads)):
            self.report(index, outcome)

    def look(self) -> int:
        """Return a number that rises when anything moves, 0 before the batch has begun."""
        return self._num_reported + sum(read.progress for read in self.reads)

    def loaded(self) -> tuple[int, int]:
        """Return how many pages were loaded, and their payload bytes."""
        done = [read for read, outcome in zip(self.reads, self.outcomes, strict=True) if outcome is ReadOutcome.LOADED]
        return len(done), sum(len(view) for read in done for view in read.views)


class GuardedStorage(Storage):
    """What the service reads through."""

    def __init__(
        self,
        inner: Storage,
        *,
        probe_timeout_s: float,
        stall_timeout_s: float,
        breaker: Breaker,
        observe: StorageObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wrap `inner`, which nobody else may call from now on.

        Args:
            inner: the storage.
            probe_timeout_s: a probe that takes longer is unavailable.
            stall_timeout_s: a batch that shows no progress for so long (up to a quarter more) is given up; so is a
                write that takes so long beyond the time for its bytes.
            breaker: opens on failures of the storage as a whole, never on those of pages.
            observe: who counts.
            clock: monotonic seconds, for the breaker.
        """
        self._inner = inner
        self.kind = inner.kind
        self.batch_bytes = inner.batch_bytes
        self.batches_in_flight = inner.batches_in_flight
        self._probe_timeout_s = probe_timeout_s
        self._look_every_s = stall_timeout_s / _LOOKS
        self._write_time = WriteTime(stall_timeout_s)
        self._breaker = breaker
        self._observe = observe or _Unobserved()
        self._clock = clock
        self._up = True
        self._distrust_until = 0.0
        self._moves = 0

    def is_up(self) -> bool:
        """Say whether L3 answered when it was last asked; a refused call does not ask."""
        return self._up

    async def open(self) -> None:
        try:
            async with asyncio.timeout(self._probe_timeout_s):
                await self._inner.open()
        except (TimeoutError, StorageUnavailableError) as error:
            self._fail(Ticket(passed=True))
            _log.warning("storage %s did not open: %s", self.kind, str(error) or "timed out")

    async def probe(self, model: ModelLayout, probe: Probe) -> Presence:
        ticket = self._breaker.admit(self._clock())
        if not ticket.passed:
            raise self._refusal()
        try:
            async with asyncio.timeout(self._probe_timeout_s):
                presence = await self._inner.probe(model, probe)
        except asyncio.CancelledError:
            self._breaker.abandon(ticket)
            raise
        except Exception as error:
            self._fail(ticket)
            self._observe.storage_error("probe", 1)
            if isinstance(error, StorageUnavailableError):
                raise
            raise StorageUnavailableError(f"{self.kind} probe: {str(error) or 'timed out'}") from error
        self._succeed(firm=self._clock() >= self._distrust_until)
        return presence

    async def read_into(self, model: ModelLayout, reads: Sequence[PageRead], report: Report) -> None:
        if not reads:
            return
        batch = _Batch(reads, report)
        begin = self._clock()
        ticket = self._breaker.admit(begin)
        if not ticket.passed:
            batch.report_rest(ReadOutcome.UNREACHABLE)
            self._count_failures(batch)
            return
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            if not self._gave_up(batch, ticket):
                timer = loop.call_later(self._look_every_s, look)

        timer = loop.call_later(self._look_every_s, look)
        unreported = ReadOutcome.ERROR
        try:
            await self._inner.read_into(model, reads, batch.report)
        except asyncio.CancelledError:
            unreported = ReadOutcome.STOPPED
            raise
        except StorageUnavailableError:
            unreported = ReadOutcome.UNREACHABLE
        except Exception:
            _log.exception("storage %s raised instead of reporting", self.kind)
        finally:
            timer.cancel()
            self.batch_bytes = self._inner.batch_bytes
            batch.report_rest(unreported)
            self._moves += 1
            self._judge(batch, ticket)
            self._count_failures(batch)
            self._observe.storage_read(*batch.loaded(), self._clock() - begin)

    async def write(self, model: ModelLayout, component_index: int, key: bytes, shards: Sequence[Buffer]) -> None:
        """Store one page as `Storage.write` says, and give it up after the time that its size warrants.

        Given up, it raises StorageUnavailableError as soon as the buffers are free: at once, but for a thread that
        hangs in a system call, which nobody can end. Such a call lasts as long as the hang, its buffers in use; it
        delays no other write. A caller who cannot wait asks in a task of his own and leaves the buffers to that.
        """
        # Its failures say nothing about reads (a full or read-only store still reads): the breaker does not see them.
        self._require_not_open()
        try:
            async with self._write_time.limit(f"{self.kind}: a write", sum(len(shard) for shard in shards)):
                await self._inner.write(model, component_index, key, shards)
        except (StorageUnavailableError, OSError):
            self._observe.storage_error("write", 1)
            raise

    async def delete(self, model: ModelLayout, component_index: int, key: bytes) -> bool:
        self._require_not_open()
        async with self._write_time.limit(f"{self.kind}: a removal", 0):
            return await self._inner.delete(model, component_index, key)

    async def aclose(self) -> None:
        await self._inner.aclose()

    def _gave_up(self, batch: _Batch, ticket: Ticket) -> bool:
        """Look whether a batch moves; give it up when it has not for long enough."""
        mark = batch.look()
        if mark != batch.mark:
            batch.mark = mark
            self._moves += 1
            batch.quiet_looks = 0
        elif mark == 0 and self._moves != batch.moves_seen:
            # It has not begun, but those before it move: it waits for its turn.
            batch.quiet_looks = 0
        else:
            batch.quiet_looks += 1
        batch.moves_seen = self._moves
        if batch.quiet_looks < _LOOKS:
            return False
        batch.is_stalled = True
        if mark > 0:
            # Another thread takes over, so whoever waits for its turn gets the whole timeout anew.
            self._moves += 1
        for read in batch.reads:
            read.stopped = True
        batch.report_rest(ReadOutcome.STALLED)
        self._observe.storage_error(ReadOutcome.STALLED, batch.outcomes.count(ReadOutcome.STALLED))
        self._fail_reads(ticket)
        self._inner.stalled(batch.reads)
        return True

    def _judge(self, batch: _Batch, ticket: Ticket) -> None:
        # 1. judged when it was given up; 2. the storage did not answer; 3. it did; 4. nothing is known about it.
        if batch.is_stalled:
            return
        if ReadOutcome.UNREACHABLE in batch.outcomes:
            self._fail_reads(ticket)
        elif ReadOutcome.LOADED in batch.outcomes:
            self._distrust_until = 0.0
            self._succeed(firm=True)
        else:
            self._breaker.abandon(ticket)

    def _count_failures(self, batch: _Batch) -> None:
        for outcome in _COUNTED:
            count = batch.outcomes.count(outcome)
            if count:
                self._observe.storage_error(outcome, count)

    def _fail_reads(self, ticket: Ticket) -> None:
        self._distrust_until = self._clock() + _DISTRUST_S
        self._fail(ticket)

    def _fail(self, ticket: Ticket) -> None:
        self._breaker.fail(self._clock(), ticket)
        self._set_up(False)

    def _succeed(self, *, firm: bool) -> None:
        self._breaker.succeed(firm=firm)
        if firm:
            self._set_up(True)

    def _set_up(self, is_up: bool) -> None:
        if is_up != self._up:
            self._up = is_up
            self._observe.storage_up(is_up)

    def _require_not_open(self) -> None:
        if self._breaker.state(self._clock()) is BreakerState.OPEN:
            raise self._refusal()

    def _refusal(self) -> StorageUnavailableError:
        wait_s = self._breaker.retry_after_s(self._clock())
        return StorageUnavailableError(f"{self.kind}: the breaker is open", retry_after_s=wait_s)
