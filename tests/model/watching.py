"""Watches an engine between events: what CONTRACT sections 1 to 3 promise of jobs, leases and slots."""

import math
from dataclasses import dataclass, field
from typing import Any

from forestage.core.job import Job, Outcome, PrefetchRequest, Reason
from forestage.core.leases import Lease
from forestage.core.loads import Load
from model.oracle import check_shortfall, largest_usable, needed_keys
from support.engine_driver import EngineDriver

__all__ = ["Watched", "Watcher"]

Publication = tuple[int, int, int]  # component, slot, how often it was published


@dataclass(eq=False)
class Watched:
    """A job and what was seen of it; `end_by` is when it must be done, in the engine's seconds."""

    job: Job
    request: PrefetchRequest
    ready: int = 0
    unavailable: bool = False
    granted: bool = False
    end_by: float = math.inf
    final: tuple[Any, ...] | None = None
    brought: set[Publication] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class _Promise:
    """A lease and the keys that its slots must show while it lives."""

    lease: Lease
    slots: tuple[tuple[int, ...], ...]
    keys: list[tuple[bytes, ...]]


class Watcher:
    """Knows all jobs and leases that there were. `look` after each event; the checks are dear and may wait a few."""

    def __init__(self, driver: EngineDriver) -> None:
        self.driver = driver
        self.jobs: list[Watched] = []
        self.by_job: dict[Job, Watched] = {}
        self.leases: list[Lease] = []
        self.pins: list[Lease] = []
        self._promises: list[_Promise] = []
        self._published: dict[tuple[int, int], int] = {}
        self._also_held: set[Publication] = set()

    def add(self, job: Job, request: PrefetchRequest) -> None:
        assert job not in self.by_job
        watched = self.by_job[job] = Watched(job, request, request.device_pages)
        self.jobs.append(watched)

    def promise(self, lease: Lease, keys: list[tuple[bytes, ...]], *, pin: bool = False) -> None:
        """Hold the engine to a lease or a pin on the pages of these keys, by component."""
        (self.pins if pin else self.leases).append(lease)
        self._promises.append(_Promise(lease, lease.slots, keys))

    def page_comes(self, load: Load) -> None:
        """A read is about to end well: its page comes for all that wait for it."""
        place = (load.component, load.slot)
        self._published[place] = self._published.get(place, 0) + 1
        for job in load.subscribers:
            self.by_job[job].brought.add((*place, self._published[place]))

    def page_written(self, component: int, slot: int) -> None:
        """A commit is about to publish a slot: what it held before is not there any more."""
        place = (component, slot)
        self._published[place] = self._published.get(place, 0) + 1

    def look(self) -> None:
        """See how every job stands; call it after each single event."""
        ended = [watched for watched in self.jobs if watched.final is None and watched.job.done]
        if len(ended) == 1 and ended[0].job.outcome is not Outcome.CANCELLED:
            self._check_that_no_more_could_be_had(ended[0])
        for watched in self.jobs:
            job = watched.job
            watched.granted |= job.timing.granted is not None
            if watched.final is None:
                assert job.ready >= watched.ready
                watched.ready = job.ready
                if job.done:
                    self._check_ended(watched)
            else:
                assert (job.lengths(), job.outcome, job.shortfall, job.count_pages()) == watched.final
                assert (job.keys, job.masks, job.holds, job.pending, job.arrived_pages) == ((), None, [], [], [])
        self._note_holders()

    def _check_that_no_more_could_be_had(self, watched: Watched) -> None:
        job, device_pages = watched.job, watched.request.device_pages
        limit = min(job.contiguous, job.granted)
        most = largest_usable(self.driver, watched.request.keys, device_pages, limit, job.lease)
        assert job.ready <= most if self.driver.settings.tenants else job.ready == most

    def _check_ended(self, watched: Watched) -> None:
        job, request = watched.job, watched.request
        lengths, device_pages = job.lengths(), request.device_pages
        watched.final = (lengths, job.outcome, dict(job.shortfall), job.count_pages())
        job.check_integrity()
        check_shortfall(lengths, job.shortfall, granted=watched.granted, unavailable=watched.unavailable)
        assert sum(job.count_pages()) <= max(0, job.contiguous - device_pages)
        if job.outcome is Outcome.CANCELLED:
            assert job.lease is None
            return
        assert (job.outcome is Outcome.COMPLETE) == (lengths.ready == lengths.requested)
        if lengths.ready < lengths.requested:
            partial = lengths.ready > device_pages
            assert (job.outcome is Outcome.PARTIAL) == partial
            assert (job.outcome is Outcome.DECLINED) == (not partial and Reason.BELOW_MIN_PAGES in job.shortfall)
        assert (job.lease is None) == (lengths.ready == device_pages)
        if job.lease is not None:
            assert (job.lease.device_pages, job.lease.length) == (device_pages, lengths.ready)
            if job.lease.alive:
                self.promise(job.lease, needed_keys(self.driver.layout, request.keys, device_pages, lengths.ready))

    def _note_holders(self) -> None:
        holders: dict[tuple[int, int], set[object]] = {}
        for job in self.driver.engine.live:
            for c, holds in enumerate(job.holds):
                for slot in holds.values():
                    holders.setdefault((c, slot), set()).add(job)
        for lease in (*self.driver.engine.leases, *self.driver.engine.pins):
            for c, slots in enumerate(lease.slots):
                for slot in slots:
                    holders.setdefault((c, slot), set()).add(lease)
        for watched in self.jobs:
            own = {watched.job, watched.job.lease}
            for c, slot, publication in watched.brought:
                if holders.get((c, slot), set()) - own:
                    self._also_held.add((c, slot, publication))

    def check_time(self) -> None:
        """After a tick: whatever had to end by now has ended."""
        now = self.driver.now
        for watched in self.jobs:
            assert watched.job.done or min(watched.end_by, watched.job.deadline or math.inf) > now
        assert all(lease.expires_at > now for lease in (*self.driver.engine.leases, *self.driver.engine.pins))

    def check_leased_slots(self) -> None:
        """The slots of a lease stay the same and show its pages as long as it lives."""
        for promise in self._promises:
            if promise.lease.alive:
                assert promise.lease.slots == promise.slots
                for c, log in enumerate(self.driver.logs):
                    assert tuple(log.visible[slot] for slot in promise.slots[c]) == promise.keys[c]

    def check_held_slots(self) -> None:
        """The slots that a job holds show its pages, and nobody may write to them."""
        writing = [{load.slot for load in loads.values() if load.filling} for loads in self.driver.pool.loads]
        for load in self.driver.stalled:
            writing[load.component].add(load.slot)
        for job in self.driver.engine.live:
            for c, holds in enumerate(job.holds):
                assert [self.driver.logs[c].visible[slot] for slot in holds.values()] == [job.keys[p] for p in holds]
                assert not writing[c] & set(holds.values())
                assert not holds.keys() & job.pending[c].keys()

    def check_cuts(self) -> None:
        """Unless somebody else has held it too, no page stays that came for a job behind its cut."""
        for watched in self.jobs:
            if watched.job.done:
                for c, slot, publication in watched.brought - self._also_held:
                    key = self.driver.logs[c].visible[slot]
                    if key is not None and self._published[c, slot] == publication:
                        assert watched.request.keys.index(key) < watched.job.contiguous
                watched.brought.clear()
