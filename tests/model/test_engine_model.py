"""The whole engine against its contract: random layouts, pools, L3 contents and orders of events.

FORESTAGE_MODEL_EXAMPLES runs that many random examples; without it a fixed set is run, the same every time.
"""

import math
import os
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forestage.core.engine import EngineSettings
from forestage.core.errors import CapacityError, ConflictError, GoneError
from forestage.core.job import Job, JobState, Lengths, Outcome, PrefetchRequest, Reason
from forestage.core.layout import Component, Covers
from forestage.core.leases import Lease
from forestage.core.loads import Load
from model.oracle import check_shortfall, expect_plan, is_boundary, largest_usable, needed_keys
from support.engine_driver import EngineDriver, chain, model_of

EXAMPLES = os.environ.get("FORESTAGE_MODEL_EXAMPLES")
pytestmark = pytest.mark.timeout(0 if EXAMPLES else 120)

MAX_PAGES = 12

FAILURES = [Reason.VANISHED, Reason.CORRUPT, Reason.STORAGE_ERROR]
INDEX = st.integers(0, 1 << 16)
DEVICE = st.sampled_from([*[0] * 12, 1, 2, 3, 5, 8, 12])
LENGTH = st.sampled_from([0, 1, 2, 3, 5, 7, 9, *[MAX_PAGES] * 14])
ASIDE = ["wait", "wait", "wait until woken", "lease", "renew", "release", "measure", "measure without L3", "change"]
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "min_pages": st.sampled_from([0, 2, 4, 9]),
        "priority": st.sampled_from([-1, 1]),
        "deadline_ms": st.sampled_from([1, 10, 100]),
        "lease_ms": st.sampled_from([1, 100, 1_000_000]),
    },
)
STATES = st.integers(0, (1 << 3 * MAX_PAGES * 3) - 1)
SECONDS = st.sampled_from([0.0, 0.0005, 0.004, 0.02, 0.02, 40.0])


@dataclass(eq=False)
class Watched:
    """A job and what was seen of it."""

    job: Job
    request: PrefetchRequest
    ready: int = 0
    unavailable: bool = False
    granted: bool = False
    end_by: float = math.inf
    final: tuple[Any, ...] | None = None
    brought: set[tuple[int, int, int]] = field(default_factory=set)  # component, slot, publication


@dataclass(frozen=True, eq=False)
class Promise:
    """A lease and the keys that its slots must show while it lives."""

    lease: Lease
    slots: tuple[tuple[int, ...], ...]
    keys: list[tuple[bytes, ...]]


@st.composite
def components(draw: st.DrawFn) -> list[Component]:
    windows = draw(st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 4, 5]), min_size=1, max_size=3))
    shards = draw(st.integers(1, 4))
    found = []
    for number, window in enumerate(windows):
        covers = Covers.TAIL if window else Covers.EVERY_PAGE
        found.append(Component(f"c{number}", draw(st.sampled_from([64, 300])), shards, covers, window))
    if all(component.is_tail for component in found):
        found[draw(st.integers(0, len(found) - 1))] = Component("kv", 128, shards)
    return found


class EngineMachine(RuleBasedStateMachine):
    """Each rule is one thing that may happen; each invariant is read off CONTRACT sections 1 to 3."""

    @initialize(
        parts=components(),
        capacities=st.lists(st.integers(1, 4) | st.integers(5, 14) | st.integers(12, 24), min_size=3, max_size=3),
        pinned_fraction=st.sampled_from([1.0, 1.0, 1.0, 0.7, 0.4]),
        budget=st.sampled_from([1 << 40, 1 << 40, 3000, 600]),
        queue_limit=st.sampled_from([8, 1, 0]),
        settle_s=st.sampled_from([0.02, 0.0]),
        forks=st.tuples(st.integers(0, MAX_PAGES), st.integers(0, MAX_PAGES)),
        absent=st.sets(st.integers(0, 3 * MAX_PAGES * 3 - 1), max_size=6),
        states=st.tuples(STATES, STATES, st.sampled_from(["all", "many", "half"])),
    )
    def build(
        self,
        parts: list[Component],
        capacities: list[int],
        pinned_fraction: float,
        budget: int,
        queue_limit: int,
        settle_s: float,
        forks: tuple[int, int],
        absent: set[int],
        states: tuple[int, int, str],
    ) -> None:
        trunk = chain("t", MAX_PAGES)
        branch = chain("b", MAX_PAGES, trunk[: forks[0]])
        self.chains = [trunk, branch, chain("c", MAX_PAGES, branch[: forks[1]])]
        self.driver = EngineDriver(
            model_of(*parts),
            capacities[: len(parts)],
            EngineSettings(budget, queue_limit, settle_s, keep_done_s=60.0, max_lease_s=100.0),
            pinned_fraction,
        )
        self.engine = self.driver.engine
        self.places = [(c, key) for c in range(len(parts)) for keys in self.chains for key in keys]
        there = {"all": -1, "many": states[0] | states[1], "half": states[0]}[states[2]]
        for number, (c, key) in enumerate(self.places):
            if there >> number & 1 if parts[c].is_tail else number not in absent:
                self.driver.stored.add((c, key))
        self.watched: list[Watched] = []
        self.by_job: dict[Job, Watched] = {}
        self.asked: list[tuple[Job, list[bytearray]]] = []
        self.promises: list[Promise] = []
        self.publications: dict[tuple[int, int], int] = {}
        self.also_held: set[tuple[int, int, int]] = set()

    # ---- requests

    def _keys(self, number: int, length: int) -> list[bytes]:
        return self.chains[number % len(self.chains)][:length]

    @rule(number=INDEX, length=LENGTH, device=DEVICE, options=OPTIONS)
    def submit(self, number: int, length: int, device: int, options: dict[str, int]) -> None:
        self._submit(number, length, device, options)

    @rule(numbers=st.lists(INDEX, min_size=2, max_size=4), length=LENGTH, device=DEVICE, options=OPTIONS)
    def submit_together(self, numbers: list[int], length: int, device: int, options: dict[str, int]) -> None:
        """Ask for overlapping prefixes at once."""
        for number in numbers:
            self._submit(number, length, device, options)

    def _submit(self, number: int, length: int, device: int, options: dict[str, int]) -> None:
        request = PrefetchRequest(
            f"r{len(self.watched)}",
            self.driver.layout.name,
            tuple(self._keys(number, length)),
            device_pages=min(device, length),
            **options,  # type: ignore[arg-type]
        )
        waiting = self.engine.admission.waiting
        try:
            job = self.engine.submit(request, self.driver.now)
        except CapacityError:
            assert waiting == self.driver.settings.queue_limit
            assert request.request_id not in self.engine.jobs
            return
        assert job not in self.by_job
        watched = Watched(job, request, request.device_pages)
        self.watched.append(watched)
        self.by_job[job] = watched

    @precondition(lambda self: self.engine.live)
    @rule(index=INDEX, reason=st.sampled_from([Reason.FINISHED, Reason.CANCELLED, Reason.SHUTDOWN, None]))
    def stop(self, index: int, reason: Reason | None) -> None:
        """Stop a job, or (None) delete it, known or not; one that is done stays as it is."""
        watched = self._live(index)
        request, job, now = watched.request, watched.job, self.driver.now
        if reason is not None:
            self.engine.stop(job, reason, now)
            settle = 0.0 if reason is Reason.CANCELLED else self.driver.settings.settle_s
            watched.end_by = min(watched.end_by, now + settle)
            assert job.done or reason is not Reason.CANCELLED
        elif self.engine.jobs.get(request.request_id) is job:
            self._submit_again(watched)
            self.engine.forget(request.request_id, now)
            assert job.done
            assert job.lease is None or not job.lease.alive
        else:
            self.engine.forget(request.request_id, now)

    def _submit_again(self, watched: Watched) -> None:
        assert self.engine.submit(watched.request, self.driver.now) is watched.job
        with pytest.raises(ConflictError):
            self.engine.submit(replace(watched.request, keys=(b"another key.....",)), self.driver.now)

    def _live(self, index: int) -> Watched:
        """Pick a job, one that is not done if there is one."""
        live = [watched for watched in self.watched if not watched.job.done] or self.watched
        return live[index % len(live)]

    # ---- probes and reads

    @precondition(lambda self: self.asked)
    @rule(index=INDEX, unavailable=st.sampled_from([False, False, False, True]))
    def answer(self, index: int, unavailable: bool) -> None:
        job, found = self.asked.pop(index % len(self.asked))
        masks = None if unavailable else found
        if job.done:
            self.engine.probe_answered(job, masks, self.driver.now)
            return
        assert job.state is JobState.PROBING
        watched = self.by_job[job]
        watched.unavailable = unavailable
        expected = expect_plan(self.driver, job.keys, job.request.device_pages, masks, job)
        self.engine.probe_answered(job, masks, self.driver.now)
        lengths = job.lengths()
        assert (lengths.host, lengths.stored) == (expected.host, expected.stored)
        assert (lengths.restorable, lengths.granted) == (expected.restorable, expected.granted)
        declined = expected.granted - expected.usable < max(1, watched.request.min_pages)
        assert watched.job.done == declined
        if declined:
            assert lengths.ready == expected.usable
        self.jobs()
        self._note_holders()

    @precondition(lambda self: len(self.engine._queue) > 0)
    @rule(batch_bytes=st.sampled_from([1, 700, 10_000]))
    def hand_out(self, batch_bytes: int) -> None:
        self.driver.begin_reads(batch_bytes)

    @precondition(lambda self: self._busy())
    @rule(pages=st.integers(1, 3), batch_bytes=st.sampled_from([1, 700, 10_000]))
    def serve(self, pages: int, batch_bytes: int) -> None:
        """Let L3 answer all that was asked, and read some pages in order."""
        while self.asked:
            self.answer(0, unavailable=False)
        for _ in range(pages):
            if self.driver.in_flight or self.driver.begin_reads(batch_bytes):
                self.end_read(0, None)

    @precondition(lambda self: self._busy())
    @rule(pages=st.integers(1, 3))
    def serve_out_of_order(self, pages: int) -> None:
        """Let L3 answer all that was asked, hand everything out, and end the youngest reads first."""
        while self.asked:
            self.answer(-1, unavailable=False)
        self.driver.begin_all_reads()
        for _ in range(pages):
            if self.driver.in_flight:
                self.end_read(-1, None)

    @precondition(lambda self: self.driver.in_flight)
    @rule(index=INDEX, failure=st.sampled_from([None, None, None, *FAILURES]))
    def end_read(self, index: int, failure: Reason | None) -> None:
        load = self.driver.in_flight[index % len(self.driver.in_flight)]
        if failure is None and (load.component, load.key) not in self.driver.stored:
            failure = Reason.VANISHED
        self._end(load, failure)

    @precondition(lambda self: self.driver.in_flight or self.driver.stalled)
    @rule(
        index=INDEX, how=st.sampled_from(["stopped", "stall", "untouched"]), failure=st.sampled_from([None, *FAILURES])
    )
    def upset_read(self, index: int, how: str, failure: Reason | None) -> None:
        """End a stopped read, give a read up or end one that was given up, or end any read without its page."""
        in_flight = self.driver.in_flight
        stopped = [load for load in in_flight if load.read is not None and load.read.stopped]
        if how == "stopped" and stopped:
            self._end(stopped[index % len(stopped)], failure, untouched=failure is None)
        elif how == "stall" and in_flight and (index % 2 or not self.driver.stalled):
            self.driver.stall_read(in_flight[index % len(in_flight)])
        elif how == "stall":
            self._end(self.driver.stalled[index % len(self.driver.stalled)], failure, untouched=failure is None)
        elif in_flight:
            self._end(in_flight[index % len(in_flight)], None, untouched=True)

    def _end(self, load: Load, failure: Reason | None, *, untouched: bool = False) -> None:
        if failure is None and not untouched and load.subscribers:
            place = (load.component, load.slot)
            self.publications[place] = self.publications.get(place, 0) + 1
            for job in load.subscribers:
                self.by_job[job].brought.add((*place, self.publications[place]))
        self.driver.end_read_as(load, failure, untouched=untouched)
        self.jobs()
        self._note_holders()

    def _busy(self) -> bool:
        return bool(self.asked or self.driver.in_flight or len(self.engine._queue))

    # ---- time, leases, questions

    @rule(number=INDEX, length=LENGTH, device=DEVICE, seconds=SECONDS, how=st.sampled_from(ASIDE))
    def aside(self, number: int, length: int, device: int, seconds: float, how: str) -> None:
        """Do what is no prefetch: let time pass, lease, renew or release (late, twice), ask, change L3."""
        if how == "wait":
            self._advance(seconds)
        elif how == "wait until woken":
            self._advance(max(0.0, (self.engine.next_time() or 0.0) - self.driver.now))
        elif how == "lease":
            self._take_lease(self._keys(number, length), min(device, length), seconds)
        elif how == "change":
            self.driver.stored ^= {self.places[number % len(self.places)]}
        elif how in {"renew", "release"}:
            if self.promises:
                self._renew_or_release(self.promises[number % len(self.promises)].lease, seconds, how == "release")
        else:
            self._measure(self._keys(number, length), min(device, length), asked=how == "measure")

    def _advance(self, seconds: float) -> None:
        self.driver.advance(seconds)
        for watched in self.watched:
            deadline = watched.job.deadline or math.inf
            assert watched.job.done or min(watched.end_by, deadline) > self.driver.now
        assert all(lease.expires_at > self.driver.now for lease in self.engine.leases)

    def _take_lease(self, keys: list[bytes], device: int, seconds: float) -> None:
        expected = expect_plan(self.driver, keys, device, None)
        lengths, lease = self.engine.take_lease(self.driver.layout.name, keys, device, seconds + 0.01, self.driver.now)
        self._check_residents(keys, device, lengths)
        if not any(self.driver.pool.loads):
            assert (lengths.host, lengths.stored) == (expected.host, expected.stored)
            assert (lengths.restorable, lengths.ready) == (expected.restorable, expected.granted)
        assert (lease is None) == (lengths.ready == device)
        if lease is not None:
            self._promise(lease, needed_keys(self.driver.layout, keys, device, lengths.ready))

    def _check_residents(self, keys: list[bytes], device: int, lengths: Lengths) -> None:
        resident = [self.driver.resident(c) for c in range(len(self.driver.logs))]
        assert is_boundary(self.driver.layout, device, lengths.restorable, lambda c, page: keys[page] in resident[c])
        assert device <= lengths.ready == lengths.granted <= lengths.restorable <= lengths.stored == lengths.host

    def _renew_or_release(self, lease: Lease, seconds: float, release: bool) -> None:
        if release:
            self.engine.leases.release(lease.id)
            assert not lease.alive
        elif lease.alive and lease.expires_at > self.driver.now:
            assert self.engine.renew_lease(lease.id, seconds + 0.01, self.driver.now) is lease
            assert lease.expires_at == self.driver.now + (seconds + 0.01)
        else:
            with pytest.raises(GoneError):
                self.engine.renew_lease(lease.id, seconds + 0.01, self.driver.now)

    def _measure(self, keys: list[bytes], device: int, *, asked: bool) -> None:
        masks = None
        if asked:
            masks = [bytearray((c, key) in self.driver.stored for key in keys) for c in range(len(self.driver.logs))]
        before = self._everything()
        expected = expect_plan(self.driver, keys, device, masks)
        plan = self.engine.measure(self.driver.layout.name, keys, device, masks)
        assert self._everything() == before
        assert (plan.host, plan.stored, plan.restorable) == (expected.host, expected.stored, expected.restorable)
        assert (plan.granted, plan.usable) == (expected.granted, expected.usable)

    def _everything(self) -> list[object]:
        """What a question must not change."""
        pool = self.driver.pool
        return [
            [(list(index._evictable), list(index._holds), bytes(index._fresh)) for index in pool.index],
            [(slots.free, slots.reserved, slots.filling, slots.resident) for slots in pool.slots],
            [list(loads) for loads in pool.loads],
            [(job.state, job.lengths()) for job in self.engine.live],
            len(self.engine.probes),
            len(self.engine.finished),
            self.engine.next_time(),
        ]

    # ---- what must hold after every step

    @invariant()
    def laws(self) -> None:
        self.driver.check()

    @invariant()
    def jobs(self) -> None:
        ended = [watched for watched in self.watched if watched.final is None and watched.job.done]
        if len(ended) == 1 and ended[0].job.outcome is not Outcome.CANCELLED:
            self._could_have_no_more(ended[0])
        for watched in self.watched:
            job = watched.job
            watched.granted |= job.timing.granted is not None
            if watched.final is None:
                assert job.ready >= watched.ready
                watched.ready = job.ready
                if job.done:
                    self._finished(watched)
            else:
                assert (job.lengths(), job.outcome, job.shortfall, job.count_pages()) == watched.final
                assert (job.keys, job.masks, job.holds, job.pending, job.arrived_pages) == ((), None, [], [], [])
        self.asked += [(job, self.driver.masks(job)) for job in self.engine.probes if not job.done]
        self.engine.probes.clear()

    def _finished(self, watched: Watched) -> None:
        job, request = watched.job, watched.request
        lengths, device = job.lengths(), request.device_pages
        watched.final = (lengths, job.outcome, dict(job.shortfall), job.count_pages())
        job.check_integrity()
        check_shortfall(lengths, job.shortfall, granted=watched.granted, unavailable=watched.unavailable)
        loaded, joined = job.count_pages()
        assert loaded + joined <= max(0, job.contiguous - device)
        if job.outcome is Outcome.CANCELLED:
            assert job.lease is None
            return
        assert (job.outcome is Outcome.COMPLETE) == (lengths.ready == lengths.requested)
        if lengths.ready < lengths.requested:
            partial = lengths.ready > device
            assert (job.outcome is Outcome.PARTIAL) == partial
            assert (job.outcome is Outcome.DECLINED) == (not partial and Reason.BELOW_MIN_PAGES in job.shortfall)
        assert (job.lease is None) == (lengths.ready == device)
        if job.lease is not None:
            assert (job.lease.device_pages, job.lease.length) == (device, lengths.ready)
            if job.lease.alive:
                self._promise(job.lease, needed_keys(self.driver.layout, request.keys, device, lengths.ready))

    def _could_have_no_more(self, watched: Watched) -> None:
        """A job that ended by itself was given the largest boundary among the pages that it had."""
        job, device = watched.job, watched.request.device_pages
        limit = min(job.contiguous, job.granted)
        assert job.ready == largest_usable(self.driver, watched.request.keys, device, limit, job.lease)

    def _promise(self, lease: Lease, keys: list[tuple[bytes, ...]]) -> None:
        self.promises.append(Promise(lease, lease.slots, keys))

    @invariant()
    def leased_slots_show_their_pages(self) -> None:
        for promise in self.promises:
            if promise.lease.alive:
                assert promise.lease.slots == promise.slots
                for c, log in enumerate(self.driver.logs):
                    assert tuple(log.visible[slot] for slot in promise.slots[c]) == promise.keys[c]

    @invariant()
    def held_slots_show_their_pages(self) -> None:
        writing = [{load.slot for load in loads.values() if load.filling} for loads in self.driver.pool.loads]
        for load in self.driver.stalled:
            writing[load.component].add(load.slot)
        for job in self.engine.live:
            for c, holds in enumerate(job.holds):
                assert [self.driver.logs[c].visible[slot] for slot in holds.values()] == [job.keys[p] for p in holds]
                assert not writing[c] & set(holds.values())
                assert not holds.keys() & job.pending[c].keys()

    @invariant()
    def nothing_stays_behind_a_cut(self) -> None:
        """Unless somebody else has held it too, no page stays that came for a job behind its cut."""
        self._note_holders()
        for watched in self.watched:
            if watched.job.done:
                for c, slot, publication in watched.brought - self.also_held:
                    key = self.driver.logs[c].visible[slot]
                    if key is not None and self.publications[c, slot] == publication:
                        assert watched.request.keys.index(key) < watched.job.contiguous
                watched.brought.clear()

    def _note_holders(self) -> None:
        holders: dict[tuple[int, int], set[object]] = {}
        for job in self.engine.live:
            for c, holds in enumerate(job.holds):
                for slot in holds.values():
                    holders.setdefault((c, slot), set()).add(job)
        for lease in self.engine.leases:
            for c, slots in enumerate(lease.slots):
                for slot in slots:
                    holders.setdefault((c, slot), set()).add(lease)
        for watched in self.watched:
            own = {watched.job, watched.job.lease}
            for c, slot, publication in watched.brought:
                if holders.get((c, slot), set()) - own:
                    self.also_held.add((c, slot, publication))

    # ---- the end

    def teardown(self) -> None:
        """Whatever happened, nothing is left of it, and the whole pool can be had again."""
        if not hasattr(self, "driver"):
            return
        driver, ending = self.driver, len(self.watched) % 3
        for watched in self.watched:
            if ending == 1:
                self.engine.stop(watched.job, Reason.FINISHED, driver.now)
            elif ending == 2:
                self.engine.forget(watched.request.request_id, driver.now)
            self.jobs()
        self._drain()
        assert not self.engine.live  # without a tick: progress needs no time and no other traffic
        driver.advance(200.0)
        driver.check_idle()
        self.jobs()
        self._prefetch_all_that_fits()

    def _drain(self) -> None:
        progress = True
        while progress:
            self.jobs()
            progress = bool(self.asked)
            for job, masks in self.asked:
                self.engine.probe_answered(job, masks, self.driver.now)
                self.jobs()
            self.asked = []
            self.driver.begin_all_reads(512)
            for load in (*self.driver.in_flight, *self.driver.stalled):
                self.driver.end_read(load)
                self.jobs()
                progress = True
            self.laws()

    def _prefetch_all_that_fits(self) -> None:
        driver = self.driver
        limits = [max(1, int(capacity * driver.pinned_fraction)) for capacity in driver.capacities]
        length = min(
            limit
            for c, limit in zip(driver.layout.components, limits, strict=True)
            if not (c.is_tail and c.window <= limit)
        )
        keys = chain("z", length)
        driver.stored = {(c, key) for c in range(len(limits)) for key in keys}
        job = driver.prefetch(keys)
        assert (job.outcome, job.ready) == (Outcome.COMPLETE, length)
        assert [tuple(shown) for shown in driver.shown(job)] == needed_keys(driver.layout, keys, 0, length)


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=int(EXAMPLES or 150),
    stateful_step_count=50,
    derandomize=EXAMPLES is None,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
