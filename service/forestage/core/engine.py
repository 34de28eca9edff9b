"""All state of prefetching and every decision about it, without any I/O.

The engine is told what happened (a request, a probe's answer, a page read, a stop, the time) and changes jobs, slots,
index, loads and leases in one step. What has to be done outside it leaves as effects: `probes` to ask,
`next_batch` to read, `finished` jobs to announce, `next_time` to be woken at. Times are seconds of one
monotonic clock.

Law: between calls every slot has one owner (see ModelPool), the admission budget covers exactly the live jobs, and
every job that is not done is queued, waits for a probe, or for reads to end. core.audit recounts all of it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from forestage.core.admission import Admission
from forestage.core.errors import CapacityError, ConflictError, NotFoundError, StoppingError
from forestage.core.expectations import Expectation, Expectations
from forestage.core.holdings import (
    drop_behind,
    hold,
    hold_slots,
    keep,
    owned_bytes,
    release,
    taken,
    unwant,
    waiting_loads,
)
from forestage.core.job import Job, JobState, Lengths, PrefetchRequest, Reason, Timing
from forestage.core.layout import ModelLayout
from forestage.core.leases import Lease, Leases
from forestage.core.loads import Load
from forestage.core.model_pool import Found, ModelPool
from forestage.core.outcome import outcome_of, shortfall_of
from forestage.core.plan import Plan
from forestage.core.prefix import PrefixMap, needed_pages
from forestage.core.read_queue import ReadQueue
from forestage.core.settling import aim, aim_below_cut, has_its_aim
from forestage.core.tenants import DEFAULT_TENANT, Tenants, TenantShare
from forestage.core.timeline import Event
from forestage.core.timers import Timers
from forestage.core.write import Write, WriteSettings
from forestage.core.write_parts import Share
from forestage.core.writes import Writes

__all__ = ["Engine", "EngineSettings"]

Masks = Sequence[bytes | bytearray]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits and times (seconds) of the engine; see the configuration reference for each."""

    budget_bytes: int
    queue_limit: int = 1024
    settle_s: float = 0.02
    keep_done_s: float = 60.0
    max_lease_s: float = 600.0
    writes: WriteSettings = field(default_factory=WriteSettings)
    max_pin_s: float = 3600.0
    tenants: tuple[TenantShare, ...] = ()
    max_jobs: int = 65536
    max_live_pages: int = 2**22
    max_leases: int = 262_144
    max_pins: int = 65536


class Engine:
    """One owner of all jobs, slots and leases. Not thread-safe: one thread calls it."""

    def __init__(self, pools: Mapping[str, ModelPool], settings: EngineSettings) -> None:
        self.pools = pools
        self.settings = settings
        self.jobs: dict[str, Job] = {}
        self.tenants = Tenants(settings.tenants)
        self.admission = Admission(settings.budget_bytes, settings.queue_limit, shares=self.tenants.shares)
        self.stopping = False
        self.probes: deque[Job] = deque()
        self.finished: deque[Job] = deque()
        self.live: set[Job] = set()
        self.live_pages = 0
        self._done: dict[Job, None] = {}  # remembered, in the order in which they ended
        self._queue = ReadQueue()
        self._granted_since = False
        self._timers: Timers[Callable[[float], None]] = Timers()
        self.leases = Leases(pools, settings.max_lease_s, self._timers, most=settings.max_leases)
        self.writes = Writes(pools, settings.writes, self._timers)
        self.pins = Leases(pools, settings.max_pin_s, self._timers, uses=False, most=settings.max_pins)
        self.expectations = Expectations(pools, settings.max_pin_s, self._timers, most=settings.max_pins)

    @property
    def num_remembered(self) -> int:
        """How many finished jobs are remembered."""
        return len(self._done)

    # ---- requests

    def pool(self, model: str) -> ModelPool:
        """Return the pool of a configured model; raises NotFoundError."""
        try:
            return self.pools[model]
        except KeyError:
            raise NotFoundError("no model of this name is configured", slug="unknown-model") from None

    def submit(self, request: PrefetchRequest, now: float, arrived: float | None = None) -> Job:
        """Start a job, or return the one that this request began before.

        `arrived` is when the request came, if that was before `now`: its deadline counts from there.
        Raises NotFoundError (model), ConflictError (id used for another request), CapacityError (queue full; too many
        jobs, pages or leases) and StoppingError, all before anything is taken.
        """
        digest = request.digest()
        known = self.jobs.get(request.request_id)
        if known is not None:
            if known.digest != digest:
                raise ConflictError("this request_id was used for a different request")
            return known
        pool = self.pool(request.model)
        self._refuse_if_stopping()
        self._refuse_beyond_limits(len(request.keys))
        arrived = now if arrived is None else min(arrived, now)
        deadline = arrived + request.deadline_ms / 1e3 if request.deadline_ms else None
        job = Job(request, pool.layout, digest, Timing(arrived), deadline, self.tenants.number(request.tenant))
        found = pool.look_up(job.keys)
        admitted = self.admission.offer(job, pool.missing_bytes(job.keys, request.device_pages, found))
        self.jobs[request.request_id] = job
        self.live.add(job)
        self.live_pages += job.requested
        if deadline is not None:
            # A hybrid prefix may need its last read after the cut: leave time for it inside the deadline.
            settle = min(self.settings.settle_s, max(0.0, deadline - now) / 2) if pool.layout.tails else 0.0
            job.timers.append(self._timers.put(deadline - settle, partial(self._on_deadline_near, job)))
        if admitted:
            self._start(job, now, found)
        else:
            job.want = pool.wants.add(job.keys[request.device_pages :])
        self.expectations.meet(request.model, request.keys)  # by now it is held, or wanted by the job
        self._admit(now)
        return job

    def stop(self, job: Job, reason: Reason, now: float) -> None:
        """End a job early: all reasons but `cancelled` settle and keep what is ready."""
        self._stop(job, reason, now)
        self._admit(now)

    def forget(self, request_id: str, now: float) -> None:
        """Cancel a job if it runs, release its lease, and forget it. Idempotent."""
        job = self.jobs.pop(request_id, None)
        if job is None:
            return
        self._stop(job, Reason.CANCELLED, now)
        self._take_back_timers(job)
        del self._done[job]
        if job.lease is not None:
            self.leases.release(job.lease.id)
        self._admit(now)

    def stop_all(self, now: float) -> None:
        """Begin to stop: no new jobs or writes, every live job settles, and what is dirty is due for L3."""
        self.stopping = True
        self.writes.stop()
        for job in tuple(self.live):
            self._stop(job, Reason.SHUTDOWN, now)

    def measure(
        self,
        model: str,
        keys: Sequence[bytes],
        device_pages: int,
        masks: Masks | None,
        tenant: str = DEFAULT_TENANT,
    ) -> Plan:
        """Say what a prefetch would find and be granted now. Holds nothing, changes no recency."""
        pool = self.pool(model)
        return pool.plan(pool.survey(keys, device_pages, masks), self.tenants.number(tenant))

    def boundaries(self, model: str, keys: Sequence[bytes], device_pages: int, masks: Masks | None) -> list[int]:
        """Return the lengths above `device_pages` at which a prefix can be resumed, as far as it is stored."""
        prefix = self.pool(model).survey(keys, device_pages, masks)
        return prefix.boundaries(prefix.reach())

    def take_lease(
        self,
        model: str,
        keys: Sequence[bytes],
        device_pages: int,
        lease_s: float,
        now: float,
        tenant: str = DEFAULT_TENANT,
    ) -> tuple[Lengths, Lease | None]:
        """Lease the resident restorable prefix; L3 is not asked, so `stored` counts only what is resident."""
        self.pool(model)
        self._refuse_if_stopping()
        return self.leases.take(model, keys, device_pages, lease_s, now, self.tenants.number(tenant))

    def pin(
        self,
        model: str,
        keys: Sequence[bytes],
        device_pages: int,
        ttl_s: float,
        now: float,
        tenant: str = DEFAULT_TENANT,
    ) -> tuple[Lengths, Lease | None]:
        """Keep the resident restorable prefix for `ttl_s` seconds, as a lease whose slots nobody is told."""
        self.pool(model)
        self._refuse_if_stopping()
        return self.pins.take(model, keys, device_pages, ttl_s, now, self.tenants.number(tenant))

    def expect(
        self,
        model: str,
        keys: Sequence[bytes],
        device_pages: int,
        ttl_s: float,
        now: float,
        tenant: str = DEFAULT_TENANT,
    ) -> Expectation | None:
        """Evict the pages of a prefix last until a prefetch asks for all of it, at most for `ttl_s` seconds.

        It need not be resident yet, and nothing is held. None if no page of it is left to expect. Raises NotFoundError,
        StoppingError, and CapacityError if too much is expected already.
        """
        self.pool(model)
        self._refuse_if_stopping()
        if device_pages >= len(keys):
            return None
        return self.expectations.add(model, keys[device_pages:], ttl_s, now, self.tenants.number(tenant))

    def demote(self, model: str, keys: Sequence[bytes], device_pages: int) -> tuple[int, int]:
        """Let the resident pages of a prefix be evicted first; see ModelPool.demote."""
        return self.pool(model).demote(keys, device_pages)

    def renew_lease(self, lease_id: str, lease_s: float, now: float, tenant: int | None = None) -> Lease:
        """Give a lease another `lease_s` seconds from now; GoneError if it has ended, or is another tenant's."""
        return self.leases.renew(lease_id, lease_s, now, tenant)

    def begin_write(
        self,
        model: str,
        keys: Sequence[bytes],
        tails: Mapping[int, Sequence[int]],
        masks: Masks | None,
        now: float,
        tenant: str = DEFAULT_TENANT,
        share: Share | None = None,
    ) -> Write:
        """Reserve slots for pages that an engine will write, see Writes.begin; join a write where `share` says so.

        Raises NotFoundError, StoppingError, and ConflictError as `join_write`.
        """
        pool = self.pool(model)
        self._refuse_if_stopping()
        joined = self.join_write(model, keys, tails, share, now, tenant)
        if joined is not None:
            return joined
        self.writes.require_room()
        return self.writes.begin(pool, keys, tails, masks, now, self.tenants.number(tenant), share)

    def join_write(
        self,
        model: str,
        keys: Sequence[bytes],
        tails: Mapping[int, Sequence[int]],
        share: Share | None,
        now: float,
        tenant: str = DEFAULT_TENANT,
    ) -> Write | None:
        """Return the write that another process has begun for `share`, if there is one, to fill a part of it.

        Raises ConflictError when it is of other pages or that part is taken, NotFoundError.
        """
        if share is None:
            return None
        return self.writes.join(self.pool(model), keys, tails, share, now, self.tenants.number(tenant))

    def commit_write(self, write_id: str, now: float) -> Write:
        """Publish the pages of a write: resident at once, in L3 behind; jobs that wait for one have it now. Idempotent.

        One of several parts is published with the last. Raises NotFoundError, and GoneError when it has expired.
        """
        write = self.writes.find(write_id, now)
        if not self.writes.finish_part(write, write_id):
            return write
        moved: dict[Job, None] = {}

        def take_page(load: Load, jobs: Sequence[Job], slot: int) -> None:
            for job in jobs:
                # Neither loaded nor joined, and not this job's to drop behind a cut.
                job.holds[load.component][taken(job, load)] = slot
                moved[job] = None

        self.writes.commit(write, take_page, now)
        for job in moved:
            if not job.done:
                self._advance(job, now)
                job.timeline.note_pages(now, job.contiguous)
        self._granted_since = True
        self._admit(now)
        return write

    def _refuse_if_stopping(self) -> None:
        if self.stopping:
            raise StoppingError("the service is stopping", retry_after_s=5.0)

    def _refuse_beyond_limits(self, num_pages: int) -> None:
        settings = self.settings
        for count, most, what in (
            (len(self.live), settings.max_jobs - 1, "prefetches are under way"),
            # One that is larger than all may be together is let in alone.
            (self.live_pages and self.live_pages + num_pages, settings.max_live_pages, "pages are asked for"),
        ):
            if count > most:
                raise CapacityError(f"too many {what} already", slug="limit-reached", retry_after_s=1.0)
        self.leases.require_room()  # it will want one

    # ---- what happened outside

    def probe_answered(self, job: Job, masks: Masks | None, now: float, unasked_from: int | None = None) -> None:
        """L3 said what is there (one mask a component), or could not be asked (None). A late answer is ignored.

        `unasked_from` is the page at which the answer ends because a part of L3 is silent.
        """
        if job.state is not JobState.PROBING:
            return
        if masks is not None:
            job.masks = [bytearray(mask) for mask in masks]
        prefix = self._survey(job, job.masks)
        if masks is None or prefix.reach() == unasked_from:
            job.span_reason = Reason.STORAGE_UNAVAILABLE
        self._grant(job, prefix, now)
        self._admit(now)

    def next_batch(self, batch_bytes: int) -> tuple[ModelLayout, list[Load]] | None:
        """Hand out the next pages to read, all of one model, in prefix order; None if nothing waits.

        Each load must come back through `read_ended`, whatever happened to its read.
        """
        batch = self._queue.next_batch(batch_bytes)
        if batch is not None:
            pool = self.pools[batch[0].name]
            for load in batch[1]:
                pool.begin(load)
        return batch

    def pages_loaded(self, model: str, loads: Iterable[Load], now: float) -> None:
        """The storage has let go of these slots: each holds its page, whole and verified."""
        pool = self.pools[model]
        moved: dict[Job, None] = {}
        for load in loads:
            jobs = load.subscribers
            if jobs:
                pool.publish(load)
                for job in jobs:
                    _take_page(job, load)
                    moved[job] = None
            else:
                pool.discard(load)
            if load.drained_for:
                self._drained(load, now)
        for job in moved:
            if not job.done:
                self._advance(job, now)
                job.timeline.note_pages(now, job.contiguous)
        self._admit(now)

    def read_ended(
        self, model: str, load: Load, failure: Reason | None, now: float, *, untouched: bool = False
    ) -> None:
        """The storage has let go of the slot: the page is whole and verified, or failed for a reason.

        `untouched` says that the read was stopped before it began.
        """
        if failure is None and not untouched:
            self.pages_loaded(model, (load,), now)
            return
        pool = self.pools[model]
        jobs = tuple(load.subscribers)
        if jobs and failure is None:
            # It was stopped for one that left, and somebody else has come since: it takes over.
            pool.unbegin(load)
            for job in jobs:
                self._queue.add_in_front(job, (load,))
        else:
            pool.discard(load)
        if failure is not None:
            for job in jobs:
                self._page_failed(job, load, failure, now)
        self._drained(load, now)
        self._admit(now)

    def read_stalled(self, model: str, load: Load, now: float) -> None:
        """Nobody will wait for this read any more, but the storage still has the slot: `read_ended` must follow."""
        self.pools[model].set_stalled(load)
        jobs, load.subscribers = tuple(load.subscribers), []
        for job in jobs:
            self._page_failed(job, load, Reason.STORAGE_ERROR, now)
        self._drained(load, now)
        self._admit(now)

    def tick(self, now: float) -> None:
        """Do what is due."""
        while (action := self._timers.pop_due(now)) is not None:
            action(now)
        self._admit(now)

    def next_time(self) -> float | None:
        """Return when `tick` should be called next."""
        return self._timers.next_time()

    # ---- the life of a job

    def _survey(
        self, job: Job, masks: Masks | None = None, *, loading: bool = True, found: Found | None = None
    ) -> PrefixMap:
        return self.pools[job.layout.name].survey(job.keys, job.request.device_pages, masks, loading, found)

    def _admit(self, now: float) -> None:
        while (job := self.admission.next_job()) is not None:
            self._start(job, now, self.pools[job.layout.name].look_up(job.keys))
        head = self.admission.first_waiting()
        if head is not None and self._granted_since:
            # What was granted since may be what it asks for: then it needs no bytes of its own.
            self._granted_since = False
            need = self.pools[head.layout.name].missing_bytes(head.keys, head.request.device_pages)
            if self.admission.lower(head, need):
                self._admit(now)

    def _start(self, job: Job, now: float, found: Found) -> None:
        job.enter(JobState.PROBING)
        job.timing.started = now
        self._hold_host(job, found)
        self._stop_wanting(job)
        job.timeline.note(now, Event.ADMITTED, job.host)
        prefix = self._survey(job, found=found)
        if prefix.largest_boundary(job.host, resident=True) == job.requested:
            self._grant(job, prefix, now)  # L3 has nothing to add
        else:
            job.timeline.note(now, Event.PROBE, job.host)
            self.probes.append(job)

    def _stop_wanting(self, job: Job) -> None:
        if job.want is not None:
            self.pools[job.layout.name].wants.remove(job.want)
            job.want = None

    def _hold_host(self, job: Job, found: Found) -> None:
        pool, device_pages = self.pools[job.layout.name], job.request.device_pages
        job.host = job.stored = pool.host_run(found, device_pages)
        job.contiguous = pool.holdable(job.keys, device_pages, job.host, job.tenant)
        for c in job.layout.every_page:
            slots = cast("list[int]", found[c][device_pages : job.contiguous])  # within the resident run
            hold_slots(pool, job, c, range(device_pages, job.contiguous), slots)

    def _grant(self, job: Job, prefix: PrefixMap, now: float) -> None:
        """Decide how much is read, and reserve all of it in this one step."""
        pool = self.pools[job.layout.name]
        plan = pool.plan(prefix, job.tenant)
        job.host, job.stored, job.restorable, job.granted = plan.host, plan.stored, plan.restorable, plan.granted
        job.timing.granted = now
        unasked = job.span_reason if job.span_reason is Reason.STORAGE_UNAVAILABLE else None
        job.timeline.note(now, Event.GRANT, plan.granted, unasked)
        if not plan.worth_reading(job.request.min_pages):
            job.stop_reason = Reason.BELOW_MIN_PAGES
            job.contiguous = plan.usable
            if plan.granted > plan.usable:
                job.timeline.note_cut(now, plan.usable, job.stop_reason)
            self._end(job, now)
            return
        job.enter(JobState.LOADING)
        job.cut_at = plan.granted
        if job.contiguous > plan.granted:  # so far it holds all of that
            for c in job.layout.every_page:
                release(pool, job, c, range(plan.granted, job.contiguous), drop_from=job.requested)
        job.contiguous = min(plan.host, plan.granted)
        if plan.keep_usable:
            job.ready = plan.usable
        job.aim = plan.granted
        aim(pool, job, prefix, plan.granted)
        self._granted_since = True
        self.admission.set_promise(job, owned_bytes(job))
        self._queue.add(job, waiting_loads(job, range(len(job.pending))))
        self._advance(job, now)

    def _page_failed(self, job: Job, load: Load, failure: Reason, now: float) -> None:
        c, page = load.component, taken(job, load)
        if not job.layout.components[c].is_tail:
            self._cut(job, page, failure, now)
            return
        if job.masks is not None:
            job.masks[c][page] = 0  # no boundary that needs this state
        self._cut(job, job.cut_at, failure, now)

    def _drained(self, load: Load, now: float) -> None:
        """A read that settling jobs gave up has ended (or never will): let them aim again."""
        jobs, load.drained_for = load.drained_for, ()
        for job in jobs:
            if load in job.draining and job.stop_reason is not None:
                job.draining.remove(load)
                self._cut(job, job.cut_at, job.stop_reason, now)

    def _advance(self, job: Job, now: float) -> None:
        """Move the contiguous length on, and end the job when nothing is pending."""
        every_page = job.layout.every_page
        page, cut_at, held = job.contiguous, job.cut_at, job.holds[every_page[0]]
        others = [job.holds[c] for c in every_page[1:]]
        while page < cut_at and page in held and (not others or all(page in other for other in others)):
            page += 1
        job.contiguous = page
        if not job.layout.tails:
            job.ready = page
        if has_its_aim(job) if job.stopped else not any(job.pending):
            self._end(job, now)
        elif job.stopped and job.settle_by is None and not any(job.pending[c] for c in every_page):
            self._begin_settling(job, now)

    def _cut(self, job: Job, limit: int, reason: Reason, now: float) -> None:
        """End the grant at `limit` pages, and aim at the largest boundary below that can still be reached."""
        pool = self.pools[job.layout.name]
        if not job.stopped or limit < job.cut_at:
            job.stop_reason = reason
        job.timeline.note_cut(now, limit, reason)
        job.aim = job.cut_at = limit
        for c in job.layout.every_page:
            self._unwant(job, c, [page for page in job.pending[c] if page >= limit])
            release(pool, job, c, [page for page in job.holds[c] if page >= limit], drop_from=limit)
        if job.layout.tails:
            aim_below_cut(pool, job, self.admission.add_promise)
            self.admission.set_promise(job, max(self.admission.promised_to(job), owned_bytes(job)))
            # Behind what is still to come of the pages before them, unless that is all here.
            add = self._queue.add if job.settle_by is None else self._queue.add_in_front
            add(job, waiting_loads(job, job.layout.tails))
        self._advance(job, now)

    def _unwant(self, job: Job, c: int, pages: Iterable[int]) -> None:
        unwant(self.pools[job.layout.name], job, c, pages, self.admission.add_promise)

    def _stop(self, job: Job, reason: Reason, now: float) -> None:
        if job.done:
            return
        if reason is Reason.CANCELLED or job.state is not JobState.LOADING:
            job.stop_reason = reason
            job.timeline.note_cut(now, job.contiguous, reason)
            self._end(job, now)
        elif job.contiguous < job.cut_at or not job.stopped:
            self._cut(job, job.contiguous, reason, now)

    def _on_deadline_near(self, job: Job, now: float) -> None:
        """Cut the job now if a state is to be read inside the deadline; else let it go on until the deadline."""
        assert job.deadline is not None
        if job.done:
            return
        settles = False
        if job.state is JobState.LOADING and job.layout.tails:
            prefix = self._survey(job, job.masks)
            length = prefix.largest_boundary(job.contiguous)
            settles = length > max(job.ready, prefix.largest_boundary(job.contiguous, resident=True))
        if settles or now >= job.deadline:
            self._stop(job, Reason.DEADLINE, now)
        else:
            job.timers.append(self._timers.put(job.deadline, partial(self._stop, job, Reason.DEADLINE)))

    def _begin_settling(self, job: Job, now: float) -> None:
        """Only tail states are missing, and there is little time for them: they need not wait their turn."""
        self._queue.add_in_front(job, waiting_loads(job, job.layout.tails))
        job.timeline.note(now, Event.SETTLE, job.aim)
        latest = now + self.settings.settle_s
        job.settle_by = latest if job.deadline is None else max(now, min(latest, job.deadline))
        job.timers.append(self._timers.put(job.settle_by, partial(self._end, job)))

    def _end(self, job: Job, now: float) -> None:
        """Leave: the only way out of a job, whatever ended it."""
        pool, device_pages = self.pools[job.layout.name], job.request.device_pages
        cancelled = job.stop_reason is Reason.CANCELLED
        kept = None
        for c in range(len(pool.slots)):
            self._unwant(job, c, list(job.pending[c]))
        # Before it is seen what can be kept: what it does not need any more must not stand in the way of what it does.
        for c in job.layout.tails:
            release(pool, job, c, list(job.holds[c]), drop_from=job.contiguous)
        if not cancelled:
            self._snap(job)
            if job.ready > device_pages:
                ranges = needed_pages(job.layout, device_pages, job.ready)
                for c, pages in enumerate(ranges):
                    # What every page needs is held without a gap, so counting tells whether all of it is.
                    if c in job.layout.tails or len(job.holds[c]) < len(pages):
                        hold(pool, job, c, pages)
                kept = keep(job, ranges)
        for c in range(len(pool.slots)):
            release(pool, job, c, list(job.holds[c]), drop_from=job.contiguous)
            drop_behind(pool, job, c, job.contiguous)
        if kept is not None:
            seconds = job.request.lease_ms / 1e3
            job.lease = self.leases.take_over(job.layout.name, device_pages, job.ready, kept, seconds, now, job.tenant)
        self._queue.remove(job)
        self._stop_wanting(job)
        self.admission.leave(job)
        self.live.discard(job)
        self.live_pages -= job.requested
        job.timing.done = now
        job.shortfall = shortfall_of(job)
        job.outcome = outcome_of(job)
        job.timeline.note(now, Event.DONE, job.ready)
        job.forget_pages()
        job.enter(JobState.DONE)
        self.finished.append(job)
        self._take_back_timers(job)
        job.timers.append(self._timers.put(now + self.settings.keep_done_s, partial(self._forget_done, job)))
        self._done[job] = None
        if len(self._done) > self.settings.max_jobs:
            oldest = next(iter(self._done))
            self._take_back_timers(oldest)
            self._forget_done(oldest, now)

    def _snap(self, job: Job) -> None:
        """Set `ready` to the largest boundary that is whole in the pool now."""
        pool = self.pools[job.layout.name]
        if job.timing.granted is not None and not job.layout.tails:
            job.ready = max(min(job.contiguous, job.granted), job.request.device_pages)
            return
        prefix = self._survey(job, loading=False)
        if job.timing.granted is None:
            # L3 never answered; what is resident is usable all the same.
            plan = pool.plan(prefix, job.tenant)
            job.host = job.stored = plan.host
            job.contiguous = job.restorable = job.granted = job.ready = plan.usable
            return
        length = prefix.largest_boundary(min(job.contiguous, job.granted), resident=True)
        while length > job.request.device_pages and any(
            prefix.cost(c, length) > pool.room(c, job.tenant) for c in job.layout.tails
        ):
            length = prefix.largest_boundary(length - 1, resident=True)
        job.ready = length

    def _take_back_timers(self, job: Job) -> None:
        for ticket in job.timers:
            self._timers.take_back(ticket)
        job.timers.clear()

    def _forget_done(self, job: Job, _now: float) -> None:
        del self.jobs[job.request.request_id]
        del self._done[job]


def _take_page(job: Job, load: Load) -> None:
    c, page = load.component, taken(job, load)
    job.holds[c][page] = load.slot
    job.arrived_pages[c].add(page)
    if not job.layout.components[c].is_tail:
        (job.loaded_pages if load.reader is job else job.joined_pages).add(page)
