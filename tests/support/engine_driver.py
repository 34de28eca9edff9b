"""Drives the pure engine without any I/O: an L3 that is a set of keys, reads that end when the test says so."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from forestage.core.audit import check_integrity
from forestage.core.engine import Engine, EngineSettings
from forestage.core.job import Job, PrefetchRequest, Reason, Timing
from forestage.core.layout import Component, Covers, ModelLayout
from forestage.core.loads import Load
from forestage.core.model_pool import ModelPool
from forestage.core.shared_index import SharedIndex
from forestage.core.slots import SlotState
from forestage.core.tenants import Tenants
from forestage.core.write import Write
from forestage.core.write_parts import Share

__all__ = ["EngineDriver", "ReadFlag", "SlotLog", "chain", "job_of", "kv_model", "load_of", "model_of"]


class SlotLog:
    """A SlotEvents that knows which key a reader of the pool would see in each slot."""

    def __init__(self, capacity: int) -> None:
        self.visible: list[bytes | None] = [None] * capacity
        self.filling = [False] * capacity
        self.page = [0] * capacity
        self.lent: set[int] = set()
        self.dirty: set[int] = set()

    def begin_fill(self, slot: int, lent: bool = False) -> None:
        assert not self.filling[slot]
        assert self.visible[slot] is None
        self.filling[slot] = True
        if lent:
            self.lent.add(slot)

    def publish(self, slot: int, key: bytes, page: int = 0, dirty: bool = False) -> None:
        assert self.filling[slot]
        assert dirty == (slot in self.lent)
        self.visible[slot], self.filling[slot], self.page[slot] = key, False, page
        self.lent.discard(slot)
        if dirty:
            self.dirty.add(slot)

    def set_clean(self, slot: int) -> None:
        self.dirty.remove(slot)

    def clear(self, slot: int) -> None:
        assert slot not in self.dirty
        self.visible[slot], self.filling[slot] = None, False
        self.lent.discard(slot)


class ReadFlag:
    """The read behind a load, as far as the engine sees it. It remembers each stop: a reader looks at any moment."""

    def __init__(self, stopped: bool) -> None:
        self._stopped = stopped
        self.stops = int(stopped)

    @property
    def stopped(self) -> bool:
        return self._stopped

    @stopped.setter
    def stopped(self, stopped: bool) -> None:
        self._stopped = stopped
        self.stops += stopped


def model_of(*components: Component, name: str = "m") -> ModelLayout:
    return ModelLayout(name=name, page_tokens=16, components=components, shards=1)


def kv_model(*, windows: Sequence[int] = (), name: str = "m") -> ModelLayout:
    """A model with one every_page component and one tail component for each window."""
    tails = [Component(f"tail{i}", 512, covers=Covers.TAIL, window=window) for i, window in enumerate(windows)]
    return model_of(Component("kv", 256), *tails, name=name)


def chain(name: str, length: int, parent: Sequence[bytes] = ()) -> list[bytes]:
    """Keys of a prefix of `length` pages that begins with those of `parent`; other names share nothing else."""
    own = range(len(parent), length)
    return [*parent, *(f"{name}{page:05}".encode().ljust(16, b".") for page in own)][:length]


def job_of(name: str, pages: int = 8, *, now: float = 0.0, **options: int) -> Job:
    """A job that no engine knows, for the parts that only read its request."""
    layout = kv_model()
    request = PrefetchRequest(name, layout.name, tuple(chain(name, pages)), **options)  # type: ignore[arg-type]
    deadline = now + request.deadline_ms / 1e3 if request.deadline_ms else None
    return Job(request, layout, request.digest(), Timing(now), deadline)


def load_of(job: Job, page: int, component: int = 0) -> Load:
    """A load that no pool knows: one page of a job, wanted by it alone."""
    return Load(component, job.keys[page], page, page, job, [job])


@dataclass
class EngineDriver:
    """One engine with one model. `stored` holds (component index, key); `failing` says how a read ends instead."""

    layout: ModelLayout
    capacities: Sequence[int]
    settings: EngineSettings = field(default_factory=lambda: EngineSettings(budget_bytes=1 << 40))
    pinned_fraction: float = 1.0
    write_reserve: float = 0.0
    stored: set[tuple[int, bytes]] = field(default_factory=set)
    failing: dict[tuple[int, bytes], Reason] = field(default_factory=dict)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.logs = [SlotLog(capacity) for capacity in self.capacities]
        shares = Tenants(self.settings.tenants).shares
        self.pool = ModelPool(self.layout, self.capacities, self.logs, self.pinned_fraction, self.write_reserve, shares)
        self.engine = Engine({self.layout.name: self.pool}, self.settings)
        self.in_flight: list[Load] = []
        self.stalled: list[Load] = []
        self.reads: list[tuple[int, bytes]] = []
        self.sequence = 0

    def restart(self) -> None:
        """Lose all but what readers can see, as a kill does, and start anew from that."""
        for log in self.logs:
            for slot, filling in enumerate(log.filling):
                if filling and slot not in log.lent:
                    log.clear(slot)
        shares = Tenants(self.settings.tenants).shares
        self.pool = ModelPool(self.layout, self.capacities, self.logs, self.pinned_fraction, self.write_reserve, shares)
        self.engine = Engine({self.layout.name: self.pool}, self.settings)
        self.in_flight, self.stalled = [], []
        dirty: list[list[tuple[int, int, bytes]]] = []
        for c, log in enumerate(self.logs):
            kept = [(log.page[slot], slot, key) for slot, key in enumerate(log.visible) if key is not None]
            kept.sort(reverse=True)
            self.pool.adopt(c, [(slot, key) for _, slot, key in kept])
            dirty.append([(page, slot, key) for page, slot, key in kept if slot in log.dirty])
        self.engine.writes.adopt(self.pool, dirty, self.now)
        self.engine.writes.quarantine(self.pool, [sorted(log.lent) for log in self.logs], self.now)

    def store(self, keys: Sequence[bytes], tails: Iterable[tuple[int, Iterable[int]]] = ()) -> None:
        """Put every_page pages of a prefix into L3, and tail states at prefix lengths (component, lengths)."""
        for c in self.layout.every_page:
            self.stored.update((c, key) for key in keys)
        for c, lengths in tails:
            self.stored.update((c, keys[length - 1]) for length in lengths)

    def submit(self, keys: Sequence[bytes], request_id: str = "", **options: int | str) -> Job:
        self.sequence += 1
        request = PrefetchRequest(request_id or f"r{self.sequence}", self.layout.name, tuple(keys), **options)  # type: ignore[arg-type]
        return self.engine.submit(request, self.now)

    def masks(self, job: Job) -> list[bytearray]:
        """What L3 has of a job's pages, told as tersely as a storage may."""
        keys, device_pages = job.keys, job.request.device_pages
        known = self.pool.survey(keys, device_pages, None).known_pages()
        first = [device_pages if c.is_tail else job.contiguous for c in self.layout.components]
        end = len(keys)
        for page in range(job.contiguous, len(keys)):
            if not known[page] and any((c, keys[page]) not in self.stored for c in self.layout.every_page):
                end = page
                break
        return [
            bytearray(first[c] <= page < end and (c, key) in self.stored for page, key in enumerate(keys))
            for c in range(len(first))
        ]

    def answer_probes(self) -> None:
        while self.engine.probes:
            job = self.engine.probes.popleft()
            if not job.done:
                self.engine.probe_answered(job, self.masks(job), self.now)

    def begin_reads(self, batch_bytes: int = 1) -> bool:
        """Hand out one batch; True if there was one."""
        batch = self.engine.next_batch(batch_bytes)
        if batch is None:
            return False
        for load in batch[1]:
            load.read = ReadFlag(not load.subscribers)
        self.in_flight += batch[1]
        self.reads += [(load.component, load.key) for load in batch[1]]
        return True

    def begin_all_reads(self, batch_bytes: int = 1) -> None:
        while self.begin_reads(batch_bytes):
            pass

    def end_read(self, load: Load) -> None:
        """End a read as the L3 of this driver would."""
        where = (load.component, load.key)
        self.end_read_as(load, self.failing.get(where, None if where in self.stored else Reason.VANISHED))

    def end_read_as(self, load: Load, failure: Reason | None, *, untouched: bool = False) -> None:
        """End a read, stalled or not, in a given way."""
        (self.stalled if load in self.stalled else self.in_flight).remove(load)
        self.engine.read_ended(self.layout.name, load, failure, self.now, untouched=untouched)

    def stall_read(self, load: Load) -> None:
        """Give a read up that still has its slot."""
        self.in_flight.remove(load)
        self.stalled.append(load)
        self.engine.read_stalled(self.layout.name, load, self.now)

    def flight(self, key: bytes, component: int = 0) -> Load:
        """Return the read of a page that is in flight."""
        return next(load for load in self.in_flight if (load.component, load.key) == (component, key))

    def run(self) -> None:
        """Answer probes and end reads in order until nothing is left to do."""
        progress = True
        while progress:
            self.answer_probes()
            progress = self.begin_reads()
            for load in tuple(self.in_flight):
                self.end_read(load)
                progress = True
            self.check()

    def prefetch(self, keys: Sequence[bytes], **options: int | str) -> Job:
        """Submit and run to the end."""
        job = self.submit(keys, "", **options)
        self.run()
        assert job.done
        return job

    # ---- writes

    def begin_write(
        self,
        keys: Sequence[bytes],
        tails: Mapping[int, Sequence[int]] | None = None,
        *,
        asked: bool = True,
        tenant: str = "default",
        share: Share | None = None,
    ) -> Write:
        """Reserve slots; unless `asked`, L3 cannot say what it has."""
        masks = [bytearray((c, key) in self.stored for key in keys) for c in range(len(self.logs))]
        known = masks if asked else None
        return self.engine.begin_write(self.layout.name, keys, tails or {}, known, self.now, tenant, share)

    def commit(self, write: Write, part: int = 0) -> Write:
        return self.engine.commit_write(write.id_of(part), self.now)

    def write(self, keys: Sequence[bytes], tails: Mapping[int, Sequence[int]] | None = None) -> Write:
        """Reserve and commit."""
        return self.commit(self.begin_write(keys, tails))

    def store_next(self, *, failing: bool = False) -> bool:
        """Let L3 take the next dirty page, or refuse it; True if there was one."""
        one = self.engine.writes.next_page()
        if one is None:
            return False
        if failing:
            self.engine.writes.not_stored(one, self.now)
        else:
            self.stored.add((one.component, one.key))
            self.engine.writes.stored(one, self.now)
        self.check()
        return True

    def store_all(self) -> None:
        while self.store_next():
            pass

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.engine.tick(self.now)

    def release(self, job: Job) -> None:
        """Release the lease of a finished job."""
        assert job.lease is not None
        self.engine.leases.release(job.lease.id)

    def lose(self, key: bytes, component: int = 0) -> None:
        """Evict one resident page that nobody holds, whether it is its turn or not."""
        index = self.pool.index[component]
        slot = index.find(key)
        self.logs[component].clear(slot)
        index.drop(slot)
        self.pool.slots[component].give_back(slot)

    def shown(self, job: Job) -> list[list[bytes | None]]:
        """What a reader of the pool sees in the slots of a finished job, by component."""
        assert job.lease is not None
        assert job.lease.alive
        return [[log.visible[slot] for slot in slots] for log, slots in zip(self.logs, job.lease.slots, strict=True)]

    def resident(self, component: int = 0) -> set[bytes]:
        """The keys that a reader of the pool can find."""
        return {key for key in self.logs[component].visible if key is not None}

    def check(self) -> None:
        """Check every law, that readers see exactly the resident pages, and that no more is pinned than may be."""
        check_integrity(self.engine)
        for slots, index, log in zip(self.pool.slots, self.pool.index, self.logs, strict=True):
            capacity = range(slots.capacity)
            assert [index.key_of(slot) for slot in capacity] == log.visible
            assert [slots.state(slot) is SlotState.FILLING for slot in capacity] == log.filling
        for c, log in enumerate(self.logs):
            self.pool.check_writes(c, list(log.lent), list(log.dirty))
        for slots, index in zip(self.pool.slots, self.pool.index, strict=True):
            if isinstance(index, SharedIndex):
                assert sum(index.charged) == slots.capacity - slots.free
            pinned = slots.reserved + slots.filling + index.held
            assert pinned <= max(1, int(slots.capacity * self.pinned_fraction))
        for job in self.engine.jobs.values():
            job.check_integrity()

    def check_idle(self) -> None:
        """Check that nothing is left: no job, lease, read, promise, and every slot can be had."""
        self.check()
        engine = self.engine
        assert (len(engine.live), len(engine.jobs), len(engine.leases), len(engine.pins)) == (0, 0, 0, 0)
        assert not list(engine.writes)
        assert not list(engine.expectations)
        assert not len(self.pool.wants)
        assert (engine.admission.promised, engine.admission.running, engine.admission.waiting) == (0, 0, 0)
        assert not self.in_flight
        assert not self.stalled
        for slots, index in zip(self.pool.slots, self.pool.index, strict=True):
            assert slots.free + index.evictable == slots.capacity
