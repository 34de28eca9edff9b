"""The one owner of the engine on the event loop: takes requests, runs probes and reads, keeps time, wakes callers."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from forestage.core.engine import Engine
from forestage.core.errors import NotFoundError, StorageUnavailableError
from forestage.core.expectations import Expectation
from forestage.core.hints import HintCounts
from forestage.core.job import Job, Lengths, PrefetchRequest, Reason
from forestage.core.leases import Lease
from forestage.core.model_pool import ModelPool
from forestage.core.plan import Plan
from forestage.core.residency import Residency
from forestage.core.tenants import DEFAULT_TENANT
from forestage.core.write import Write
from forestage.core.write_parts import Share
from forestage.prefetch.feed import ResidencyFeed
from forestage.prefetch.fills import Fills
from forestage.prefetch.page_keys import PageKeys
from forestage.prefetch.reads import Reads, SlotMemory
from forestage.prefetch.regions import Regions
from forestage.prefetch.write_behind import WriteBehind
from forestage.storage.base import Presence, Probe, Storage

__all__ = ["JobObserver", "PrefetchService"]

log = logging.getLogger("forestage.prefetch")


class JobObserver(Protocol):
    """Who counts finished jobs; must not raise."""

    def job_finished(self, job: Job) -> None: ...


class PrefetchService:
    """Prefetches, lookups, leases and writes for callers on one event loop.

    `run` must be running while requests are taken. All state is the engine's; a task here that is cancelled or
    fails can lose time, but no slot.
    """

    def __init__(
        self,
        engine: Engine,
        memory: SlotMemory,
        region_of: Callable[[str, int], int],
        storage: Storage,
        observer: JobObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
        write_attempt_s: float = 60.0,
        residency: ResidencyFeed | None = None,
        companions: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
        hints: HintCounts | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            engine: called by nobody else from now on.
            memory: of the slots.
            region_of: index in `memory` of a model's component.
            storage: L3.
            observer: who counts finished jobs.
            clock: monotonic seconds.
            write_attempt_s: how long one attempt to store a page may take, if the storage does not end it sooner.
            residency: tells listeners what comes into the pool and leaves it.
            companions: run beside it in the same task group; each ends soon after `residency` is closed.
            hints: counts what became of hints; whoever carries them out adds to it.
        """
        self.engine = engine
        self.storage = storage
        self._observer = observer
        self._clock = clock
        self.page_keys = PageKeys()
        self.residency = residency or ResidencyFeed(Residency(engine.pools))
        self._reads = Reads(engine, memory, region_of, storage, clock, self._progress)
        self._writes = WriteBehind(engine, memory, region_of, storage, clock, self._progress, attempt_s=write_attempt_s)
        self.fills = Fills(memory, region_of, self._fill_ended)
        self.regions = Regions(self.fills.wake)
        self._probing: dict[Job, asyncio.Task[None]] = {}
        self._waiting: dict[Job, asyncio.Event] = {}
        self._writers: dict[Write, asyncio.Event] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self.hints = hints or HintCounts()
        self._companions = companions
        self._tasks: asyncio.TaskGroup | None = None
        self._idle = asyncio.Event()
        self._closing = asyncio.Event()

    async def run(self, started: asyncio.Event) -> None:
        """Serve until `stop`. Owns every background task; returns when the last one has ended.

        Cancelled or failed instead, it ends every job with reason `shutdown` on its way out.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                try:
                    self.regions.serve(self._tasks)
                    started.set()
                    for companion in self._companions:
                        self._tasks.create_task(companion())
                    self._progress()  # an earlier life may have left pages for L3
                    await self._closing.wait()
                finally:
                    self._closing.set()  # before the group cancels its tasks: none may be started by their ends
                    self.fills.close()
                    self.regions.close()
                for task in self._probing.values():
                    task.cancel()
        finally:
            self._tasks = None
            self.engine.stop_all(self._clock())
            self._reads.close()
            self.page_keys.close()
            self._writes.close()
            self.residency.close()
            self._progress()
            self._wake_writers()
            if self._timer is not None:
                self._timer.cancel()

    async def stop(self, grace_s: float) -> bool:
        """Settle all jobs with reason `shutdown`, refuse new ones, write out what is dirty, and end `run`.

        Returns False when reads or writes were still under way after `grace_s` seconds; `run` ends when they do. What
        is still dirty then stays so in the pool, for the next start.
        """
        self.engine.stop_all(self._clock())
        self._progress()
        try:
            async with asyncio.timeout(grace_s):
                while self.engine.live or self._reads.in_flight or self.fills.in_flight or self._has_writes():
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            reads, writes = self._reads.in_flight, self._writes.in_flight
            log.warning("still under way after the grace of %.1f s: %d reads, %d writes", grace_s, reads, writes)
        self._closing.set()
        self._wake_writers()
        self.residency.close()
        return not self._reads.in_flight and not self._writes.in_flight

    def _has_writes(self) -> bool:
        """Say whether dirty pages are being written out, or will be."""
        can_begin = self._tasks is not None and not self._closing.is_set()
        return self._writes.in_flight > 0 or (can_begin and self.engine.writes.backlog > 0)

    # ---- prefetches

    def now(self) -> float:
        """Return the time by the clock that deadlines are counted by."""
        return self._clock()

    def submit(self, request: PrefetchRequest, arrived: float | None = None) -> tuple[Job, bool]:
        """Start a prefetch, or find the one that this request began; say whether it is new. See Engine.submit."""
        known = self.engine.jobs.get(request.request_id)
        job = self.engine.submit(request, self._clock(), arrived)
        self._progress()
        return job, job is not known

    def find(self, request_id: str, tenant: str | None = None) -> Job:
        """Return a job that is remembered, and is the tenant's if one is named; raises NotFoundError."""
        job = self.engine.jobs.get(request_id)
        if job is None or tenant not in {None, job.request.tenant}:
            raise NotFoundError("no prefetch with this id: unknown, forgotten or deleted", slug="unknown-job")
        return job

    async def wait(self, job: Job) -> None:
        """Return when the job is done. Leaving early changes nothing."""
        if not job.done:
            await self._waiting.setdefault(job, asyncio.Event()).wait()

    def finish(self, job: Job) -> None:
        """Stop a job now; it settles and keeps what is ready."""
        self.engine.stop(job, Reason.FINISHED, self._clock())
        self._progress()

    def cancel(self, job: Job) -> None:
        """Stop a job whose client has left; it hands out nothing."""
        self.engine.stop(job, Reason.CANCELLED, self._clock())
        self._progress()

    def forget(self, request_id: str, tenant: str | None = None) -> None:
        """Cancel a job, release its lease and forget it, if it is the tenant's where one is named. Idempotent."""
        job = self.engine.jobs.get(request_id)
        if job is None or tenant not in {None, job.request.tenant}:
            return
        self.engine.forget(request_id, self._clock())
        self._progress()

    # ---- without a job

    async def lookup(
        self, model: str, keys: Sequence[bytes], device_pages: int, tenant: str = DEFAULT_TENANT
    ) -> tuple[Plan, list[int]]:
        """Say what a prefetch would find and be granted now, and all boundaries; ask L3, hold and fetch nothing."""
        pool = self.engine.pool(model)
        prefix = pool.survey(keys, device_pages, None)
        masks: Sequence[bytes | bytearray] | None = None
        host = prefix.reach(resident=True)
        if prefix.largest_boundary(host, resident=True) < len(keys):
            probe = Probe(keys, first_page=device_pages, first_tail=device_pages, known=prefix.known_pages())
            presence = await self._ask(pool, probe)
            masks = None if presence is None else presence.masks
        plan = self.engine.measure(model, keys, device_pages, masks, tenant)
        return plan, self.engine.boundaries(model, keys, device_pages, masks) if pool.layout.tails else []

    def take_lease(
        self, model: str, keys: Sequence[bytes], device_pages: int, lease_ms: int, tenant: str = DEFAULT_TENANT
    ) -> tuple[Lengths, Lease | None]:
        """Lease the resident restorable prefix. Never asks L3."""
        answer = self.engine.take_lease(model, keys, device_pages, lease_ms / 1e3, self._clock(), tenant)
        self._progress()
        return answer

    def renew_lease(self, lease_id: str, lease_ms: int, tenant: str | None = None) -> Lease:
        """Give a lease another `lease_ms` milliseconds from now; raises GoneError, also if it is not the tenant's."""
        lease = self.engine.renew_lease(lease_id, lease_ms / 1e3, self._clock(), self._number(tenant))
        self._progress()
        return lease

    def release_lease(self, lease_id: str, tenant: str | None = None) -> None:
        """End a lease, if it is the tenant's where one is named. Idempotent."""
        self.engine.leases.release(lease_id, self._number(tenant))
        self._progress()

    def pin(
        self, model: str, keys: Sequence[bytes], device_pages: int, ttl_ms: int, tenant: str = DEFAULT_TENANT
    ) -> tuple[Lengths, Lease | None]:
        """Keep the resident restorable prefix for `ttl_ms` milliseconds. Never asks L3."""
        answer = self.engine.pin(model, keys, device_pages, ttl_ms / 1e3, self._clock(), tenant)
        self._progress()
        return answer

    def unpin(self, pin_id: str, tenant: str | None = None) -> None:
        """End a pin, if it is the tenant's where one is named. Idempotent."""
        self.engine.pins.release(pin_id, self._number(tenant))
        self._progress()

    def knows_pin(self, pin_id: str, tenant: str | None = None) -> bool:
        """Say whether there is a pin of this id, and it is the tenant's where one is named."""
        return self.engine.pins.knows(pin_id, self._number(tenant))

    def expect(
        self, model: str, keys: Sequence[bytes], device_pages: int, ttl_ms: int, tenant: str = DEFAULT_TENANT
    ) -> Expectation | None:
        """Evict a prefix last until it is asked for, at most for `ttl_ms` milliseconds; see Engine.expect."""
        expected = self.engine.expect(model, keys, device_pages, ttl_ms / 1e3, self._clock(), tenant)
        self._progress()
        return expected

    def expects(self, expect_id: str, tenant: str | None = None) -> bool:
        """Say whether there is an expectation of this id, and it is the tenant's where one is named."""
        return self.engine.expectations.knows(expect_id, self._number(tenant))

    def expect_no_more(self, expect_id: str, tenant: str | None = None) -> None:
        """End an expectation, if it is the tenant's where one is named. Idempotent."""
        self.engine.expectations.drop(expect_id, self._number(tenant))
        self._progress()

    def _number(self, tenant: str | None) -> int | None:
        return None if tenant is None else self.engine.tenants.number(tenant)

    def remaining_ms(self, lease: Lease) -> int:
        """Return how long a lease still lives."""
        return max(0, int((lease.expires_at - self._clock()) * 1e3))

    def spans_ms(self, job: Job) -> dict[str, float]:
        """Return where a job's time went so far."""
        return job.timing.spans_ms(self._clock())

    # ---- writes

    async def begin_write(
        self,
        model: str,
        keys: Sequence[bytes],
        tails: Mapping[int, Sequence[int]],
        tenant: str = DEFAULT_TENANT,
        share: Share | None = None,
    ) -> Write:
        """Reserve slots for pages that are neither resident nor in L3; `tails[c]`: pages that carry a state.

        L3 is asked first; while it cannot be asked, nothing counts as stored. With `share`, who comes first begins the
        write, and the others join it. Raises NotFoundError, StoppingError, ConflictError.
        """
        pool = self.engine.pool(model)
        joined = self.engine.join_write(model, keys, tails, share, self._clock(), tenant)
        if joined is not None:
            return joined
        first_page = pool.host_run(pool.look_up(keys), 0)
        missing = (page for c, pages in tails.items() for page in pages if pool.index[c].find(keys[page]) < 0)
        first_tail = min(missing, default=len(keys))
        masks = None
        if min(first_page, first_tail) < len(keys):
            # Also behind the first gap: every page counts here, not only a prefix.
            known = b"\1" * len(keys)
            probe = Probe(keys, first_page=first_page, first_tail=first_tail, known=known)
            presence = await self._ask(pool, probe)
            masks = None if presence is None else presence.masks
        write = self.engine.begin_write(model, keys, tails, masks, self._clock(), tenant, share)
        self._progress()
        return write

    def commit_write(self, write_id: str) -> Write:
        """Publish the pages of a write; see Engine.commit_write."""
        write = self.engine.commit_write(write_id, self._clock())
        self._progress()
        return write

    def drop_write(self, write_id: str, tenant: str | None = None) -> None:
        """Give the slots of a write back, or forget a committed one, if it is the tenant's. Idempotent."""
        self.engine.writes.drop(write_id, self._clock(), self._number(tenant))
        self._progress()

    def find_write(self, write_id: str, tenant: str | None = None) -> Write:
        """Return a write that is open or committed, and is the tenant's if one is named.

        Raises NotFoundError, GoneError.
        """
        return self.engine.writes.find(write_id, self._clock(), self._number(tenant))

    async def wait_for_write(self, write: Write) -> None:
        """Return when every page of a write is durable or failed, when it ends otherwise, or when the service stops.

        Leaving early changes nothing.
        """
        if not write.settled and not self._closing.is_set():
            await self._writers.setdefault(write, asyncio.Event()).wait()

    def _wake_writers(self) -> None:
        """Nothing becomes durable any more."""
        for waiting in self._writers.values():
            waiting.set()
        self._writers.clear()

    def write_remaining_ms(self, write: Write) -> int:
        """Return how long a write may still be committed."""
        return max(0, int((write.expires_at - self._clock()) * 1e3))

    # ---- effects of the engine

    def _progress(self) -> None:
        """Carry out what the engine's last step left to do."""
        engine = self.engine
        if self._tasks is not None and not self._closing.is_set():
            while engine.probes:
                job = engine.probes.popleft()
                if not job.done:
                    task = self._probing[job] = self._tasks.create_task(self._probe(job))
                    # However the task ends, the job must not wait for an answer that will never come.
                    task.add_done_callback(partial(self._probe_answered, job, None))
            self._reads.start(self._tasks)
            self._writes.start(self._tasks, reading=self._reads.delivering)
        while engine.finished:
            self._announce(engine.finished.popleft())
        while engine.writes.settled:
            waiting = self._writers.pop(engine.writes.settled.popleft(), None)
            if waiting is not None:
                waiting.set()
        self.residency.wake()
        self.fills.wake()
        self._arm_timer()
        self._idle.set()

    def _fill_ended(self) -> None:
        self._idle.set()

    def _announce(self, job: Job) -> None:
        task = self._probing.pop(job, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        if self._observer is not None:
            self._observer.job_finished(job)
        waiting = self._waiting.pop(job, None)
        if waiting is not None:
            waiting.set()

    async def _probe(self, job: Job) -> None:
        pool, keys, device_pages = self.engine.pool(job.layout.name), job.keys, job.request.device_pages
        prefix = pool.survey(keys, device_pages, None)
        # What the job holds cannot go while L3 answers; what is merely resident can, so L3 is asked for it too.
        probe = Probe(keys, first_page=job.contiguous, first_tail=device_pages, known=prefix.known_pages())
        self._probe_answered(job, await self._ask(pool, probe))

    def _probe_answered(self, job: Job, presence: Presence | None, *_: object) -> None:
        if self._probing.pop(job, None) is not None:
            masks, unasked_from = (None, None) if presence is None else (presence.masks, presence.unasked_from)
            self.engine.probe_answered(job, masks, self._clock(), unasked_from)
            job.timeline.reserved = self._clock()
            self._progress()

    async def _ask(self, pool: ModelPool, probe: Probe) -> Presence | None:
        """Ask L3; None if it could not be asked."""
        try:
            return await self.storage.probe(pool.layout, probe)
        except StorageUnavailableError:
            return None
        except Exception:
            log.exception("a storage raised instead of answering a probe; it counts as unavailable")
            return None

    def _arm_timer(self) -> None:
        when = self.engine.next_time()
        if self._timer is not None:
            if when is not None and self._timer_at <= when:
                return  # wakes early enough; it will arm itself anew
            self._timer.cancel()
            self._timer = None
        if when is not None:
            self._timer_at = when
            delay = max(0.0, when - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.engine.tick(self._clock())
        self._progress()
