"""Drives the pure engine without any I/O: an L3 that is a set of keys, reads that end when the test says so."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from forestage.core.audit import check_integrity
from forestage.core.engine import Engine, EngineSettings
from forestage.core.job import Job, PrefetchRequest, Reason
from forestage.core.layout import Component, Covers, ModelLayout
from forestage.core.loads import Load
from forestage.core.model_pool import ModelPool

__all__ = ["EngineDriver", "SlotLog", "kv_model", "model_of"]


class SlotLog:
    """A SlotEvents that knows which key a reader of the pool would see in each slot."""

    def __init__(self, capacity: int) -> None:
        self.visible: list[bytes | None] = [None] * capacity
        self.filling = [False] * capacity

    def begin_fill(self, slot: int) -> None:
        self.visible[slot], self.filling[slot] = None, True

    def publish(self, slot: int, key: bytes) -> None:
        assert self.filling[slot]
        self.visible[slot], self.filling[slot] = key, False

    def clear(self, slot: int) -> None:
        self.visible[slot], self.filling[slot] = None, False


def model_of(*components: Component, name: str = "m") -> ModelLayout:
    return ModelLayout(name=name, page_tokens=16, components=components, shards=1)


def kv_model(*, windows: Sequence[int] = (), name: str = "m") -> ModelLayout:
    """A model with one every_page component and one tail component for each window."""
    tails = [Component(f"tail{i}", 512, covers=Covers.TAIL, window=window) for i, window in enumerate(windows)]
    return model_of(Component("kv", 256), *tails, name=name)


@dataclass
class EngineDriver:
    """One engine with one model. `stored` holds (component index, key); `failing` says how a read ends instead."""

    layout: ModelLayout
    capacities: Sequence[int]
    settings: EngineSettings = field(default_factory=lambda: EngineSettings(budget_bytes=1 << 40))
    pinned_fraction: float = 1.0
    stored: set[tuple[int, bytes]] = field(default_factory=set)
    failing: dict[tuple[int, bytes], Reason] = field(default_factory=dict)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.logs = [SlotLog(capacity) for capacity in self.capacities]
        self.pool = ModelPool(self.layout, self.capacities, self.logs, self.pinned_fraction)
        self.engine = Engine({self.layout.name: self.pool}, self.settings)
        self.in_flight: list[Load] = []
        self.reads: list[tuple[int, bytes]] = []
        self.sequence = 0

    def store(self, keys: Sequence[bytes], tails: Iterable[tuple[int, Iterable[int]]] = ()) -> None:
        """Put every_page pages of a prefix into L3, and tail states at prefix lengths (component, lengths)."""
        for c in self.layout.every_page:
            self.stored.update((c, key) for key in keys)
        for c, lengths in tails:
            self.stored.update((c, keys[length - 1]) for length in lengths)

    def submit(self, keys: Sequence[bytes], request_id: str = "", **options: int) -> Job:
        self.sequence += 1
        request = PrefetchRequest(request_id or f"r{self.sequence}", self.layout.name, tuple(keys), **options)  # type: ignore[arg-type]
        return self.engine.submit(request, self.now)

    def masks(self, keys: Sequence[bytes]) -> list[bytearray]:
        return [bytearray((c, key) in self.stored for key in keys) for c in range(len(self.layout.components))]

    def answer_probes(self) -> None:
        while self.engine.probes:
            job = self.engine.probes.popleft()
            self.engine.probe_answered(job, self.masks(job.keys), self.now)

    def begin_reads(self, batch_bytes: int = 1) -> bool:
        """Hand out one batch; True if there was one."""
        batch = self.engine.next_batch(batch_bytes)
        if batch is None:
            return False
        self.in_flight += batch[1]
        self.reads += [(load.component, load.key) for load in batch[1]]
        return True

    def end_read(self, load: Load) -> None:
        """End a read as the L3 of this driver would."""
        self.in_flight.remove(load)
        where = (load.component, load.key)
        failure = self.failing.get(where, None if where in self.stored else Reason.VANISHED)
        self.engine.read_ended(self.layout.name, load, failure, self.now)

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

    def prefetch(self, keys: Sequence[bytes], **options: int) -> Job:
        """Submit and run to the end."""
        job = self.submit(keys, **options)
        self.run()
        assert job.done
        return job

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.engine.tick(self.now)

    def check(self) -> None:
        """Check every law, and that readers of the pool see exactly the resident pages."""
        check_integrity(self.engine)
        for index, log in zip(self.pool.index, self.logs, strict=True):
            assert [index.key_of(slot) for slot in range(len(log.visible))] == log.visible
        for job in self.engine.jobs.values():
            job.check_integrity()
