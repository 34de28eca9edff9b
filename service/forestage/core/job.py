"""One prefetch: its request, its lengths, and the states it goes through.

Law (CONTRACT section 2): device_pages <= host <= stored <= requested, ready <= granted <= restorable <= stored, and
once done requested - ready is exactly the sum of the shortfall.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import xxhash

from forestage.core.layout import ModelLayout
from forestage.core.timeline import Event, Timeline

if TYPE_CHECKING:
    from forestage.core.leases import Lease
    from forestage.core.loads import Load
    from forestage.core.wants import Want

__all__ = ["TRANSITIONS", "Job", "JobState", "Lengths", "Outcome", "PrefetchRequest", "Reason", "Timing"]


class JobState(StrEnum):
    QUEUED = "queued"
    PROBING = "probing"
    LOADING = "loading"
    DONE = "done"


#: What may follow what. Every state may end at once; nothing follows `done`.
TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.PROBING, JobState.DONE}),
    JobState.PROBING: frozenset({JobState.LOADING, JobState.DONE}),
    JobState.LOADING: frozenset({JobState.DONE}),
    JobState.DONE: frozenset(),
}


class Outcome(StrEnum):
    COMPLETE = "complete"
    PARTIAL = "partial"
    MISS = "miss"
    DECLINED = "declined"
    CANCELLED = "cancelled"


class Reason(StrEnum):
    """Why `ready` is below `requested`, in the contract's order from the end of the request inward."""

    NOT_STORED = "not_stored"
    STORAGE_UNAVAILABLE = "storage_unavailable"
    NO_BOUNDARY = "no_boundary"
    HOST_CAPACITY = "host_capacity"
    BELOW_MIN_PAGES = "below_min_pages"
    DEADLINE = "deadline"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    SHUTDOWN = "shutdown"
    VANISHED = "vanished"
    CORRUPT = "corrupt"
    STORAGE_ERROR = "storage_error"


@dataclass(frozen=True, slots=True)
class PrefetchRequest:
    """What a caller asks for. Times are milliseconds, 0 for none (`lease_ms`: at least 1).

    `traceparent` says in W3C's words on whose behalf, for logs and traces; it makes no request another one.
    """

    request_id: str
    model: str
    keys: tuple[bytes, ...]
    device_pages: int = 0
    min_pages: int = 1
    priority: int = 0
    deadline_ms: int = 0
    lease_ms: int = 30_000
    tenant: str = "default"
    traceparent: str = ""

    def digest(self) -> bytes:
        """16 bytes that are equal for equal requests, so that a finished job need not keep its keys."""
        small = (
            self.model,
            self.device_pages,
            self.min_pages,
            self.priority,
            self.deadline_ms,
            self.lease_ms,
            self.tenant,
        )
        parts = (repr(small).encode(), bytes(map(len, self.keys)), *self.keys)
        return xxhash.xxh3_128_digest(b"".join(parts))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prefix lengths in pages."""

    requested: int
    host: int
    stored: int
    restorable: int
    granted: int
    ready: int


@dataclass(slots=True)
class Timing:
    """Moments in seconds of the engine's clock; None for what has not happened (yet)."""

    arrived: float
    started: float | None = None
    granted: float | None = None
    done: float | None = None

    def spans_ms(self, now: float) -> dict[str, float]:
        """Milliseconds in the queue, in the probe, in loading, and in all."""
        end = now if self.done is None else self.done
        started = end if self.started is None else self.started
        granted = end if self.granted is None else self.granted
        return {
            "queued": (started - self.arrived) * 1e3,
            "probe": (granted - started) * 1e3,
            "load": (end - granted) * 1e3,
            "total": (end - self.arrived) * 1e3,
        }


@dataclass(slots=True, eq=False)
class Job:
    """A prefetch under way or done. Only the engine changes it. `tenant` is the number of who asks, see Tenants.

    `aim` is the boundary whose pages it holds or waits for, `cut_at` how far it can come at all. `holds[c]` and
    `pending[c]` are by page: the slots of resident pages that it holds, and the loads that it waits for.
    `arrived_pages[c]` are the pages that it held and that came from L3 while it ran. `draining` are reads of tail
    states that it gave up when it was cut, while it needs their slots for a lower boundary.
    """

    request: PrefetchRequest
    layout: ModelLayout
    digest: bytes
    timing: Timing
    deadline: float | None
    tenant: int = 0
    state: JobState = JobState.QUEUED
    outcome: Outcome | None = None
    keys: Sequence[bytes] = ()
    requested: int = 0
    host: int = 0
    stored: int = 0
    restorable: int = 0
    granted: int = 0
    ready: int = 0
    contiguous: int = 0
    shortfall: dict[Reason, int] = field(default_factory=dict)
    span_reason: Reason = Reason.NOT_STORED
    stop_reason: Reason | None = None
    aim: int = 0
    cut_at: int = 0
    settle_by: float | None = None
    masks: list[bytearray] | None = None
    holds: list[dict[int, int]] = field(default_factory=list)
    pending: list[dict[int, "Load"]] = field(default_factory=list)
    arrived_pages: list[set[int]] = field(default_factory=list)
    draining: "set[Load]" = field(default_factory=set)
    loaded_pages: set[int] = field(default_factory=set)
    joined_pages: set[int] = field(default_factory=set)
    totals: tuple[int, int] = (0, 0)
    lease: "Lease | None" = None
    want: "Want | None" = None  # while it is queued
    timers: list[int] = field(default_factory=list)
    timeline: Timeline = field(default_factory=Timeline)

    def __post_init__(self) -> None:
        self.keys = self.request.keys
        self.requested = len(self.keys)
        device_pages = self.request.device_pages
        self.host = self.stored = self.restorable = self.granted = self.ready = self.contiguous = device_pages
        self.timeline.note(self.timing.arrived, Event.ARRIVED, self.requested)
        num_components = len(self.layout.components)
        self.holds = [{} for _ in range(num_components)]
        self.pending = [{} for _ in range(num_components)]
        self.arrived_pages = [set() for _ in range(num_components)]

    @property
    def done(self) -> bool:
        return self.state is JobState.DONE

    @property
    def stopped(self) -> bool:
        """Something told this job to end before its grant was whole."""
        return self.stop_reason is not None

    def count_pages(self) -> tuple[int, int]:
        """Return how many pages of the contiguous prefix this job read, and how many it joined another's read of."""
        if self.done:
            return self.totals
        loaded = sum(page < self.contiguous for page in self.loaded_pages)
        joined = sum(page < self.contiguous for page in self.joined_pages - self.loaded_pages)
        return loaded, joined

    def forget_pages(self) -> None:
        """Let go of everything by page: a job that is done is remembered for a while, its keys need not be."""
        self.totals = self.count_pages()
        self.request = replace(self.request, keys=())
        self.keys, self.masks = (), None
        self.holds, self.pending, self.arrived_pages = [], [], []
        self.draining = set()
        self.loaded_pages, self.joined_pages = set(), set()

    def enter(self, state: JobState) -> None:
        """Go to the next state; a transition that is not in the table is a defect."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"job {self.state} cannot become {state}")
        self.state = state

    def lengths(self) -> Lengths:
        return Lengths(self.requested, self.host, self.stored, self.restorable, self.granted, self.ready)

    def check_integrity(self) -> None:
        """Check the arithmetic of the contract; raise with all lengths if it is broken."""
        lengths = self.lengths()
        device_pages = self.request.device_pages
        if not device_pages <= self.host <= self.stored <= self.requested:
            raise RuntimeError(f"{lengths} with {device_pages} device pages")
        if not device_pages <= self.ready <= self.granted <= self.restorable <= self.stored:
            raise RuntimeError(f"{lengths} with {device_pages} device pages")
        if self.done and self.requested - self.ready != sum(self.shortfall.values()):
            raise RuntimeError(f"{lengths} but shortfall {self.shortfall}")
        if any(pages <= 0 for pages in self.shortfall.values()):
            raise RuntimeError(f"shortfall {self.shortfall}")
        self.timeline.check_integrity()
