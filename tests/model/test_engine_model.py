"""The whole engine against its contract: random layouts, pools, L3 contents and orders of events.

FORESTAGE_MODEL_EXAMPLES runs that many random examples; without it a fixed set is run, the same every time.
"""

import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forestage.core.engine import EngineSettings
from forestage.core.errors import CapacityError, ConflictError, GoneError, NotFoundError
from forestage.core.index import PageIndex
from forestage.core.job import Job, JobState, Lengths, Outcome, PrefetchRequest, Reason
from forestage.core.layout import Component, Covers
from forestage.core.leases import Lease
from forestage.core.loads import Load
from forestage.core.shared_index import SharedIndex
from forestage.core.tenants import TenantShare
from forestage.core.write import WriteSettings
from forestage.core.write_parts import Share
from model.oracle import Expected, expect_plan, expect_write, kept_for_writes, needed_keys
from model.watching import Watched, Watcher
from model.writing import Writing
from support.engine_driver import EngineDriver, chain, model_of

EXAMPLES = os.environ.get("FORESTAGE_MODEL_EXAMPLES")
pytestmark = pytest.mark.timeout(0 if EXAMPLES else 120)

MAX_PAGES = 12

FAILURES = [Reason.VANISHED, Reason.CORRUPT, Reason.STORAGE_ERROR]
INDEX = st.integers(0, 1 << 16)
DEVICE = st.sampled_from([*[0] * 12, 1, 2, 3, 5, 8, 12])
LENGTH = st.sampled_from([0, 1, 2, 3, 5, 7, 9, *[MAX_PAGES] * 14])
ASIDE = [
    *("wait", "wait", "wait until woken", "lease", "renew", "release", "measure", "measure without L3", "change"),
    *("pin", "unpin", "demote", "expect", "expect no more"),
]
TENANTS = ["default", "a", "b", "c"]
SHARES: list[tuple[TenantShare, ...]] = [
    *[()] * 4,
    (TenantShare("a", 0.25), TenantShare("b", 0.3)),
    (TenantShare("a", 0.5, 0.5), TenantShare("b", 0.5)),
    (TenantShare("a", 0.4), TenantShare("default", 0.1, 0.6)),
]
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "min_pages": st.sampled_from([0, 2, 4, 9]),
        "priority": st.sampled_from([-1, 1]),
        "deadline_ms": st.sampled_from([1, 10, 100]),
        "lease_ms": st.sampled_from([1, 100, 1_000_000]),
        "tenant": st.sampled_from(TENANTS),
    },
)
STATES = st.integers(0, (1 << 3 * MAX_PAGES * 3) - 1)
SECONDS = st.sampled_from([0.0, 0.0005, 0.004, 0.02, 0.02, 40.0])


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


def _orders(index: PageIndex) -> list[list[int]]:
    """The orders of eviction, that of demoted pages last."""
    return [list(index._orders.slots(account)) for account in range(len(index._reuse))]


class EngineMachine(RuleBasedStateMachine):
    """Each rule is one thing that may happen; each invariant is read off CONTRACT sections 1 to 3."""

    @initialize(
        parts=components(),
        capacities=st.lists(st.integers(1, 4) | st.integers(5, 14) | st.integers(12, 24), min_size=3, max_size=3),
        pinned_fraction=st.sampled_from([1.0, 1.0, 1.0, 0.7, 0.4]),
        budget=st.sampled_from([1 << 40, 1 << 40, 3000, 600]),
        queue_limit=st.sampled_from([8, 1, 0]),
        settle_s=st.sampled_from([0.02, 0.0]),
        write_reserve=st.sampled_from([0.0, 0.0, 0.3]),
        may_be_dirty=st.sampled_from([1.0, 1.0, 0.5]),
        attempts=st.sampled_from([1, 2, 5]),
        forks=st.tuples(st.integers(0, MAX_PAGES), st.integers(0, MAX_PAGES)),
        absent=st.sets(st.integers(0, 3 * MAX_PAGES * 3 - 1), max_size=6),
        states=st.tuples(STATES, STATES, st.sampled_from(["all", "many", "half"])),
        tenants=st.sampled_from(SHARES),
    )
    def build(
        self,
        parts: list[Component],
        capacities: list[int],
        pinned_fraction: float,
        budget: int,
        queue_limit: int,
        settle_s: float,
        write_reserve: float,
        may_be_dirty: float,
        attempts: int,
        forks: tuple[int, int],
        absent: set[int],
        states: tuple[int, int, str],
        tenants: tuple[TenantShare, ...],
    ) -> None:
        trunk = chain("t", MAX_PAGES)
        branch = chain("b", MAX_PAGES, trunk[: forks[0]])
        self.chains = [trunk, branch, chain("c", MAX_PAGES, branch[: forks[1]])]
        self.driver = EngineDriver(
            model_of(*parts),
            capacities[: len(parts)],
            EngineSettings(
                budget,
                queue_limit,
                settle_s,
                keep_done_s=60.0,
                max_lease_s=100.0,
                writes=WriteSettings(may_be_dirty, max_attempts=attempts),
                max_pin_s=150.0,
                tenants=tenants,
            ),
            pinned_fraction,
            min(write_reserve, pinned_fraction * (1 - sum(share.min_share for share in tenants))),
        )
        self.places = [(c, key) for c in range(len(parts)) for keys in self.chains for key in keys]
        there = {"all": -1, "many": states[0] | states[1], "half": states[0]}[states[2]]
        for number, (c, key) in enumerate(self.places):
            if there >> number & 1 if parts[c].is_tail else number not in absent:
                self.driver.stored.add((c, key))
        self._begin_life()

    def _begin_life(self) -> None:
        self.engine = self.driver.engine
        self.watcher = Watcher(self.driver)
        self.writing = Writing(self.driver)
        self.asked: list[tuple[Job, list[bytearray]]] = []
        self.names = 0  # of writes of several parts

    # ---- requests

    def _keys(self, number: int, length: int) -> list[bytes]:
        return self.chains[number % len(self.chains)][:length]

    @rule(number=INDEX, length=LENGTH, device=DEVICE, options=OPTIONS)
    def submit(self, number: int, length: int, device: int, options: dict[str, int | str]) -> None:
        self._submit(number, length, device, options)

    @rule(numbers=st.lists(INDEX, min_size=2, max_size=4), length=LENGTH, device=DEVICE, options=OPTIONS)
    def submit_together(self, numbers: list[int], length: int, device: int, options: dict[str, int | str]) -> None:
        """Ask for overlapping prefixes at once."""
        for number in numbers:
            self._submit(number, length, device, options)

    def _submit(self, number: int, length: int, device: int, options: dict[str, int | str]) -> None:
        request = PrefetchRequest(
            f"r{len(self.watcher.jobs)}",
            self.driver.layout.name,
            tuple(self._keys(number, length)),
            device_pages=min(device, length),
            **options,  # type: ignore[arg-type]
        )
        waiting = self.engine.admission.waiting
        try:
            job = self.engine.submit(request, self.driver.now)
        except CapacityError:
            assert waiting == self.driver.settings.queue_limit or self.driver.settings.tenants
            assert request.request_id not in self.engine.jobs
            return
        self.watcher.add(job, request)

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
        live = [watched for watched in self.watcher.jobs if not watched.job.done] or self.watcher.jobs
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
        watched = self.watcher.by_job[job]
        watched.unavailable = unavailable
        expected = expect_plan(self.driver, job.keys, job.request.device_pages, masks, job, tenant=job.request.tenant)
        self.engine.probe_answered(job, masks, self.driver.now)
        lengths = job.lengths()
        assert (lengths.host, lengths.stored) == (expected.host, expected.stored)
        assert (lengths.restorable, lengths.granted) == (expected.restorable, expected.granted)
        declined = expected.granted - expected.usable < max(1, watched.request.min_pages)
        assert watched.job.done == declined
        if declined:
            assert lengths.ready == expected.usable
        self._look()

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
            self.watcher.page_comes(load)
        self.driver.end_read_as(load, failure, untouched=untouched)
        self._look()

    # ---- writes

    @rule(
        numbers=st.lists(INDEX, min_size=1, max_size=2),
        length=LENGTH,
        states=st.lists(INDEX, max_size=4),
        asked=st.sampled_from([True, False, False]),
        parts=st.sampled_from([1, 1, 2]),
    )
    def begin_writes(self, numbers: list[int], length: int, states: list[int], asked: bool, parts: int) -> None:
        """Reserve for one writer, or for two whose pages may be the same; each of one process, or of two."""
        for number in numbers:
            self._begin_write(number, length, states, asked, parts)

    def _begin_write(self, number: int, length: int, states: list[int], asked: bool, parts: int) -> None:
        keys, tenant = self._keys(number, length), TENANTS[number % 4]
        # In whatever order: pages are told as they were asked.
        pages = list(dict.fromkeys(state % length for state in states)) if length else []
        tails = dict.fromkeys(self.driver.layout.tails, pages)
        granted, stored, lent = expect_write(self.driver, keys, tails, asked, tenant)
        before = [driver_log.lent.copy() for driver_log in self.driver.logs]
        self.names += 1
        shares = [Share(f"{self.names}", part, parts) if parts > 1 else None for part in (0, 1)]
        write = self.driver.begin_write(keys, tails, asked=asked, tenant=tenant, share=shares[0])
        if write.num_parts:
            assert self.driver.begin_write(keys, tails, asked=asked, tenant=tenant, share=shares[1]) is write
        assert (write.granted, list(write.stored)) == (granted, stored)
        assert (write.reason is None) == (granted == length)
        assert [set(slots) for slots in write.slots] == lent
        for c, log in enumerate(self.driver.logs):
            assert log.lent - before[c] == set(write.slots[c].values())
            shown = write.slots_of(c)
            assert shown == [write.slots[c].get(page) for page in (pages if c in tails else range(length))]
        self.writing.open.append(write)
        self._look()

    @precondition(lambda self: self.writing.open)
    @rule(index=INDEX, how=st.sampled_from(["commit", "commit", "commit", "drop"]))
    def end_write(self, index: int, how: str) -> None:
        """Commit or drop a write, in time or too late."""
        write = self.writing.open.pop(index % len(self.writing.open))
        if how == "drop":
            is_shared, was_lent = bool(write.num_parts), self.writing.lent_to(write)
            for _ in range(2):
                self.engine.writes.drop(write.id_of(1), self.driver.now)
            # Of two processes the other one may go on for a while.
            assert self.writing.lent_to(write) == (is_shared and was_lent)
        elif write.expires_at <= self.driver.now:
            with pytest.raises((GoneError, NotFoundError)):
                self.driver.commit(write)
        else:
            if write.num_parts:
                self.driver.commit(write, 1)
                assert not write.committed
            new, duplicates = self.writing.expect_commit(write)
            for c, _, _, slot in new:
                self.watcher.page_written(c, slot)
            self.driver.commit(write)
            assert self.driver.commit(write) is write
            assert write.committed == len({page for _, page, _, _ in new})
            assert write.duplicate == len(duplicates)
            self.writing.committed(write, new)
        self._look()

    @rule(pages=st.integers(1, 3))
    def hand_out_dirty(self, pages: int) -> None:
        for _ in range(pages):
            self.writing.hand_out()

    @precondition(lambda self: self.writing.in_flight)
    @rule(index=INDEX, well=st.sampled_from([True, True, True, False]))
    def end_write_out(self, index: int, well: bool) -> None:
        self.writing.end(index, well=well)
        self._look()

    @precondition(lambda self: any(index for index in self.driver.pool.index))
    @rule(chance=st.sampled_from([True, False, False, False]))
    def kill(self, chance: bool) -> None:
        """End this life without any notice, and begin the next one with what readers can see."""
        if chance:
            dirty = self.writing.dirty()
            self.driver.restart()
            self._begin_life()
            self.writing.adopted(dirty)

    def _look(self) -> None:
        """See what an event has done, and let L3 hear what is asked now, as it is now."""
        self.watcher.look()
        self.asked += [(job, self.driver.masks(job)) for job in self.engine.probes if not job.done]
        self.engine.probes.clear()

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
            self._take_lease(self._keys(number, length), min(device, length), seconds, TENANTS[number % 4])
        elif how == "pin":
            self._pin(self._keys(number, length), min(device, length), seconds, TENANTS[number % 4])
        elif how == "unpin":
            if self.watcher.pins:
                pin = self.watcher.pins[number % len(self.watcher.pins)]
                self.engine.pins.release(pin.id)
                assert not pin.alive
        elif how == "demote":
            self._demote(self._keys(number, length), min(device, length))
        elif how == "expect":
            self._expect(self._keys(number, length), min(device, length), seconds, TENANTS[number % 4])
        elif how == "expect no more":
            for expected in list(self.engine.expectations)[:1]:
                self.engine.expectations.drop(expected.id)
                assert not expected.want.alive
        elif how == "change":
            self.driver.stored ^= {self.places[number % len(self.places)]}
        elif how in {"renew", "release"}:
            leases = self.watcher.leases
            if leases:
                self._renew_or_release(leases[number % len(leases)], seconds, how == "release")
        else:
            tenant = TENANTS[number % 4]
            self._measure(self._keys(number, length), min(device, length), tenant, asked=how == "measure")

    def _advance(self, seconds: float) -> None:
        self.driver.advance(seconds)
        self.watcher.check_time()

    def _take_lease(self, keys: list[bytes], device: int, seconds: float, tenant: str) -> None:
        expected = expect_plan(self.driver, keys, device, None, loading=False, tenant=tenant)
        model, now = self.driver.layout.name, self.driver.now
        lengths, lease = self.engine.take_lease(model, keys, device, seconds + 0.01, now, tenant)
        self._leased(keys, device, expected, lengths, lease, pin=False)

    def _pin(self, keys: list[bytes], device: int, seconds: float, tenant: str) -> None:
        fates = [(index.used, index.unused) for index in self.driver.pool.index]
        expected = expect_plan(self.driver, keys, device, None, loading=False, tenant=tenant)
        lengths, pin = self.engine.pin(self.driver.layout.name, keys, device, seconds + 0.01, self.driver.now, tenant)
        self._leased(keys, device, expected, lengths, pin, pin=True)
        assert [(index.used, index.unused) for index in self.driver.pool.index] == fates

    def _leased(
        self, keys: list[bytes], device: int, expected: Expected, lengths: Lengths, lease: Lease | None, *, pin: bool
    ) -> None:
        ready = expected.granted
        assert lengths == Lengths(len(keys), expected.host, expected.host, expected.restorable, ready, ready)
        assert (lease is None) == (ready == device)
        if lease is not None:
            self.watcher.promise(lease, needed_keys(self.driver.layout, keys, device, ready), pin=pin)

    def _demote(self, keys: list[bytes], device: int) -> None:
        pool = self.driver.pool
        resident = [{key: slot for key in keys[device:] if (slot := index.find(key)) >= 0} for index in pool.index]
        held = {key for index, of in zip(pool.index, resident, strict=True) for key in of if index.is_held(of[key])}
        visible = [list(log.visible) for log in self.driver.logs]
        answer = self.engine.demote(self.driver.layout.name, keys, device)
        assert answer == (len({key for of in resident for key in of} - held), len(held))
        assert [log.visible for log in self.driver.logs] == visible
        for index, of in zip(pool.index, resident, strict=True):
            idle = [of[key] for key in keys[::-1] if key in of and not index.is_held(of[key])]
            idle = [slot for slot in idle if not index._wanted[slot]]
            assert _orders(index)[-1][: len(idle)] == idle

    def _expect(self, keys: list[bytes], device: int, seconds: float, tenant: str) -> None:
        visible = [list(log.visible) for log in self.driver.logs]
        expected = self.engine.expect(self.driver.layout.name, keys, device, seconds, self.driver.now, tenant)
        assert (expected is None) == (device >= len(keys))
        assert [log.visible for log in self.driver.logs] == visible

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

    def _measure(self, keys: list[bytes], device: int, tenant: str, *, asked: bool) -> None:
        masks = None
        if asked:
            masks = [bytearray((c, key) in self.driver.stored for key in keys) for c in range(len(self.driver.logs))]
        before = self._everything()
        expected = expect_plan(self.driver, keys, device, masks, tenant=tenant)
        plan = self.engine.measure(self.driver.layout.name, keys, device, masks, tenant)
        boundaries = self.engine.boundaries(self.driver.layout.name, keys, device, masks)
        assert self._everything() == before
        assert (plan.host, plan.stored, plan.restorable) == (expected.host, expected.stored, expected.restorable)
        assert (plan.granted, plan.usable) == (expected.granted, expected.usable)
        assert max(boundaries, default=device) == expected.restorable

    def _everything(self) -> list[object]:
        """What a question must not change."""
        pool = self.driver.pool
        return [
            [(_orders(index), list(index._holds), bytes(index._fresh)) for index in pool.index],
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
    def jobs_and_leases(self) -> None:
        self._look()
        self.watcher.check_leased_slots()
        self.watcher.check_held_slots()
        self.watcher.check_cuts()
        self.writing.check()

    # ---- the end

    def teardown(self) -> None:
        """Whatever happened, nothing is left of it, and the whole pool can be had again."""
        if not hasattr(self, "driver"):
            return
        driver, ending = self.driver, len(self.watcher.jobs) % 3
        for watched in self.watcher.jobs:
            if ending == 1:
                self.engine.stop(watched.job, Reason.FINISHED, driver.now)
            elif ending == 2:
                self.engine.forget(watched.request.request_id, driver.now)
            self._look()
        self._drain()
        assert not self.engine.live  # without a tick: progress needs no time and no other traffic
        driver.advance(200.0)  # open writes, leases and pins end, and what L3 did not take is tried again
        self.writing.drain()
        driver.advance(200.0)
        driver.check_idle()
        self._look()
        self._prefetch_all_that_fits()

    def _drain(self) -> None:
        progress = True
        while progress:
            self._look()
            progress = bool(self.asked)
            for job, masks in self.asked:
                self.engine.probe_answered(job, masks, self.driver.now)
                self._look()
            self.asked = []
            self.driver.begin_all_reads(512)
            for load in (*self.driver.in_flight, *self.driver.stalled):
                self.driver.end_read(load)
                self._look()
                progress = True
            self.laws()

    def _prefetch_all_that_fits(self) -> None:
        driver = self.driver
        limits = [
            max(1, int(capacity * driver.pinned_fraction)) - kept
            for capacity, kept in zip(driver.capacities, kept_for_writes(driver), strict=True)
        ]
        for c, index in enumerate(driver.pool.index):
            if isinstance(index, SharedIndex):
                number, capacity = self.engine.tenants.number("a"), driver.capacities[c]
                promised = sum(index.minimum) - index.minimum[number]
                pinned_by_others = sum(index._pinned_minimum) - index._pinned_minimum[number]
                kept = kept_for_writes(driver)[c]
                bounds = index.maximum[number], capacity - promised - kept, limits[c] - pinned_by_others
                limits[c] = min(limits[c], *bounds)
        length = min(
            limit
            for c, limit in zip(driver.layout.components, limits, strict=True)
            if not (c.is_tail and c.window <= limit)
        )
        if not length:
            return  # everything is promised to others
        keys = chain("z", length)
        driver.stored = {(c, key) for c in range(len(limits)) for key in keys}
        job = driver.prefetch(keys, tenant="a")
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
