"""What the service answers, as values. Lengths are prefix lengths in pages from page 0 of the request's keys.

All are frozen and may be pickled. Members that a newer service adds to its answers are ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "Component",
    "Evicted",
    "Hashed",
    "Hinted",
    "HintedAction",
    "Info",
    "Lease",
    "Leased",
    "Lengths",
    "Lookup",
    "LookupLengths",
    "Model",
    "Moment",
    "Pinned",
    "Pool",
    "PoolEvent",
    "Prefetch",
    "Readiness",
    "Region",
    "Timeline",
    "Write",
    "WritePart",
    "WriteStatus",
]


@dataclass(frozen=True, slots=True)
class Lengths:
    """How far a prefix goes: device_pages <= host <= stored <= requested, ready <= granted <= restorable <= stored."""

    requested: int
    host: int
    stored: int
    restorable: int
    granted: int
    ready: int


@dataclass(frozen=True, slots=True)
class LookupLengths:
    """How far a prefix would go; `grantable` is what a prefetch could get room for now."""

    requested: int
    host: int
    stored: int
    restorable: int
    grantable: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A promise that named slots are neither evicted nor rewritten for `expires_in_ms` from the answer on."""

    id: str
    expires_in_ms: int


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A job as it was when the service answered; final once `done`.

    `state`: "queued", "probing", "loading" or "done". `outcome`: None until done, then "complete", "partial", "miss",
    "declined" or "cancelled". `tokens` is `pages` in tokens. `loaded` and `joined` count pages. `shortfall` maps a
    reason to a number of pages; absent means 0. `slots[component]` of a component that every page needs holds page
    `device_pages + j` at index j; of a tail component, its window ending at `pages.ready`. Slots may be read while the
    lease lasts; `slots` is empty and `lease` None unless the job is done with more than `device_pages` ready.
    `keys` are the page keys if a Prompt asked for them, in the answer to `prefetch` itself.
    """

    request_id: str
    model: str
    state: str
    outcome: str | None
    page_tokens: int
    pages: Lengths
    tokens: Lengths
    loaded: int
    joined: int
    shortfall: Mapping[str, int]
    lease: Lease | None
    slots: Mapping[str, tuple[int, ...]]
    timing_ms: Mapping[str, float]
    keys: tuple[bytes, ...] = ()

    @property
    def done(self) -> bool:
        return self.state == "done"


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a prefetch would find. A snapshot: nothing is held, and it may be outdated on arrival.

    `boundaries` are the lengths in pages, ascending, above `device_pages` and up to `pages.stored`, at which the prefix
    can be resumed; None for a model without tail components, where each length can.
    """

    pages: LookupLengths
    tokens: LookupLengths
    keys: tuple[bytes, ...] = ()
    boundaries: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Filled:
    """What a fill brought: `filled` are the pages of each component that are whole in the region."""

    pages: Lengths
    filled: Mapping[str, range]
    outcome: str
    shortfall: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Leased:
    """The resident restorable prefix, leased without reading L3; `slots` and `lease` as in Prefetch.

    Lengths that the service does not name are `device_pages`.
    """

    pages: Lengths
    lease: Lease | None
    slots: Mapping[str, tuple[int, ...]]
    keys: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Hashed:
    """The page keys of a prompt, those of its whole pages, and the scheme that they follow."""

    model: str
    scheme: str
    page_tokens: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """Slots for pages that the caller will put into the pool, until `expires_at_s`.

    `stored` are the indexes of pages that need nothing: resident or in L3 already. Pages from `granted` on got no
    slots, for `reason`: "host_capacity" or "back_pressure" (come back later), None when all did. `slots[component]` has
    one entry a page, or one for each index in `tails[component]`; None where there is no slot. `expires_at_s` is by
    `time.monotonic()`, counted from before the request was sent. `instance` and `generation` are the pool's.
    """

    id: str
    model: str
    tails: Mapping[str, tuple[int, ...]]
    stored: tuple[int, ...]
    granted: int
    reason: str | None
    slots: Mapping[str, tuple[int | None, ...]]
    instance: str
    generation: int
    expires_in_ms: int
    expires_at_s: float


@dataclass(frozen=True, slots=True)
class WritePart:
    """Part `part` of `parts` of a write that as many processes fill together, such as the ranks of an engine.

    They name the same `request_id` (1 to 128 of `A-Za-z0-9._:-`), keys and tails; each fills what is its own in every
    slot, and commits. The pages are published when all have. Who drops its part ends the write for all.
    """

    request_id: str
    part: int
    parts: int


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """What became of the pages of a committed write, in pages; final once `settled`.

    `committed` pages are resident; of these L3 has `durable` and did not take `failed`. `duplicate` pages had become
    resident otherwise meanwhile, and keep that copy. Nothing is committed while others still fill `parts_left` parts.
    """

    committed: int
    durable: int
    failed: int
    duplicate: int = 0
    parts_left: int = 0

    @property
    def settled(self) -> bool:
        """Whether L3 has each page or is given up on it."""
        return not self.parts_left and self.durable + self.failed >= self.committed


@dataclass(frozen=True, slots=True)
class Pinned:
    """A prefix that stays resident for a while: its lengths, and how long. `id` is None if nothing could be pinned."""

    id: str | None
    pages: Lengths
    expires_in_ms: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """Counts of pages: `evicted` go first when room is needed, `kept` are held by somebody and stay as they are."""

    evicted: int
    kept: int


@dataclass(frozen=True, slots=True)
class Region:
    """Where the slots of a component lie: slot i at `offset + i * slot_bytes`, shard s of it `s * shard_bytes` on.

    All in bytes from the start of the pool file, but for `slots` and `shards`. `shard_bytes` is a stride and may
    exceed the payload (`Component.bytes`).
    """

    offset: int
    slot_bytes: int
    slots: int
    shards: int
    shard_bytes: int


@dataclass(frozen=True, slots=True)
class Pool:
    """The shared pool file: `regions[model][component]`. `instance` and `generation` change at every start."""

    path: str
    bytes: int
    instance: str
    generation: int
    regions: Mapping[str, Mapping[str, Region]]


@dataclass(frozen=True, slots=True)
class Component:
    """One payload kind of a page: `bytes` a page and shard; `window` in pages, for `covers` = "tail" only.

    `slots` is None when the answer does not say.
    """

    name: str
    bytes: int
    covers: str = "every_page"
    window: int = 0
    shards: int = 1
    slots: int | None = None

    @property
    def is_tail(self) -> bool:
        return self.covers == "tail"


@dataclass(frozen=True, slots=True)
class Model:
    """A configured model; `fingerprint` names its layout in L3, `hash` the scheme of its page keys, None if unsaid."""

    name: str
    page_tokens: int
    components: tuple[Component, ...]
    shards: int = 1
    dtype: str = "bfloat16"
    layout: str = "page_first"
    fingerprint: str = ""
    hash: str | None = None


@dataclass(frozen=True, slots=True)
class Info:
    """What runs: `pinned` says how the pool is pinned. `fields` is the whole answer, newer members included."""

    version: str
    storage: str
    pinned: str
    uptime_s: float
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the service takes work; `storage` is "up", "degraded" (prefetches end as misses) or "" if unsaid."""

    ready: bool
    storage: str = ""

    def __bool__(self) -> bool:
        return self.ready


@dataclass(frozen=True, slots=True)
class HintedAction:
    """What became of one hint. `reason` is None where `outcome` is "accepted"; `detail` explains a rejection.

    The members behind them are there for the actions that have them: `request_id` to `pages` for a prefetch, which may
    still be running; `pin_id`, `expires_in_ms` and `pages` for a pin; `expect_id`, `expires_in_ms` and `marked` (pages)
    for an expectation; `demoted` and `kept` for a demotion. `keys` are those of the prompt, if it asked to have them.
    """

    action_id: str
    action_type: str
    outcome: str
    reason: str | None = None
    detail: str | None = None
    request_id: str | None = None
    state: str | None = None
    shortfall: Mapping[str, int] = field(default_factory=dict)
    pages: Lengths | None = None
    pin_id: str | None = None
    expect_id: str | None = None
    expires_in_ms: int | None = None
    marked: int | None = None
    demoted: int | None = None
    kept: int | None = None
    keys: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Hinted:
    """What became of the hints of one envelope, in their order."""

    message_id: str
    actions: tuple[HintedAction, ...]


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened to a prefetch, `at_ms` after its arrival; what `pages` are goes by the event."""

    at_ms: float
    event: str
    pages: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened when to a prefetch. Of its `cuts` only the first are among the moments."""

    request_id: str
    model: str
    state: str
    outcome: str | None
    trace_id: str | None
    cuts: int
    moments: tuple[Moment, ...]


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """What changed in the pool, or what to do about what is known of it.

    `event` is "stored" or "removed" (then with `model`, `component` and `keys`), "reset" (forget all; with the
    `instance` and `generation` of the pool), "ready" (all is known now) or "gap" (events were missed; a reset
    follows). `id` is where to go on behind it, None for events that are part of a list.
    """

    event: str
    id: str | None = None
    model: str | None = None
    component: str | None = None
    keys: tuple[bytes, ...] = ()
    instance: str | None = None
    generation: int | None = None
