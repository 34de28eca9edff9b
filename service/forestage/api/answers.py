"""Shapes of answers; what OpenAPI shows of them."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from forestage.api.bodies import PageKey
from forestage.core.hints import HintOutcome

__all__ = [
    "EvictedAnswer",
    "FillAnswer",
    "HashAnswer",
    "Health",
    "HintAnswer",
    "HintsAnswer",
    "InfoAnswer",
    "LeaseAnswer",
    "LeasedAnswer",
    "LengthsAnswer",
    "LookupAnswer",
    "ModelsAnswer",
    "PinnedAnswer",
    "PoolAnswer",
    "PrefetchAnswer",
    "RenewAnswer",
    "WriteAnswer",
    "WriteCounts",
]

Model = Annotated[str, Field(description="The model's name.")]
PageTokens = Annotated[int, Field(description="Tokens of a page.")]
InTokens = "The same lengths in tokens: `pages` x `page_tokens`."
AskedKeys = Annotated[list[PageKey] | None, Field(description="The page keys, where `include_keys` asks for them.")]
Slots = Annotated[
    dict[str, list[int]] | None,
    Field(
        description="Slot numbers by component, where there is a lease that lives. Of an every-page component those of "
        "pages `device_pages` to `ready`; of a tail component those of its window ending at `ready`."
    ),
]
Shortfall = Annotated[
    dict[str, int], Field(description="Pages by reason; of a finished job they add up to `requested` - `ready`.")
]
JobStateName = Literal["queued", "probing", "loading", "done"]
ExpiresInMs = Annotated[int, Field(description="Milliseconds that it lives from now.")]
Instance = Annotated[str, Field(description="This start of the service.")]
Generation = Annotated[int, Field(description="Rises with every start on this pool.")]


class LengthsAnswer(BaseModel):
    """Prefix lengths, counted from page 0."""

    requested: int = Field(description="Keys asked for.")
    host: int = Field(description="In the pool when the job was admitted, or on the GPU.")
    stored: int = Field(description="In the pool, on the way, or in L3, without a gap.")
    restorable: int = Field(description="The largest boundary in `stored`.")
    granted: int = Field(description="The largest boundary that the pool had room for.")
    ready: int = Field(description="The largest boundary that is whole in the pool.")


class LookupLengths(BaseModel):
    """Prefix lengths, counted from page 0."""

    requested: int = Field(description="Keys asked for.")
    host: int = Field(description="In the pool now, or on the GPU.")
    stored: int = Field(description="In the pool, on the way, or in L3, without a gap.")
    restorable: int = Field(description="The largest boundary in `stored`.")
    grantable: int = Field(description="The largest boundary that the pool has room for now.")


class LeaseAnswer(BaseModel):
    """A promise that slots are neither evicted nor rewritten for a while."""

    id: str = Field(description="To renew and release it.")
    expires_in_ms: ExpiresInMs


class PrefetchAnswer(BaseModel):
    """A prefetch as it is now."""

    request_id: str = Field(description="The job's name.")
    model: Model
    state: JobStateName = Field(description="`done` is final; until then `ready` only grows.")
    outcome: Literal["complete", "partial", "miss", "declined", "cancelled"] | None = Field(
        description="How it ended; null until it is done."
    )
    page_tokens: PageTokens
    pages: LengthsAnswer = Field(description="In pages. A length that is not known yet equals `device_pages`.")
    tokens: LengthsAnswer = Field(description=InTokens)
    loaded: int = Field(description="Pages that this job read.")
    joined: int = Field(description="Pages whose read another job had begun.")
    shortfall: Shortfall
    lease: LeaseAnswer | None = Field(default=None, description="Once done with `ready` > `device_pages`.")
    slots: Slots = None
    timing_ms: dict[str, float] = Field(description="Milliseconds: `queued`, `probe`, `load` and `total`.")
    keys: AskedKeys = None


class FilledPages(BaseModel):
    """Pages of one component that are whole in the region."""

    first: int = Field(description="The first of them.")
    pages: int = Field(description="How many, from there on.")


class FillAnswer(BaseModel):
    """What a fill brought. Nothing is written to the region any more."""

    model: Model
    outcome: Literal["complete", "partial", "miss", "declined", "cancelled"] = Field(description="How its job ended.")
    page_tokens: PageTokens
    pages: LengthsAnswer = Field(description="In pages, of the job.")
    tokens: LengthsAnswer = Field(description=InTokens)
    loaded: int = Field(description="Pages that were read for this.")
    joined: int = Field(description="Pages whose read another job had begun.")
    shortfall: Shortfall
    filled: dict[str, FilledPages] = Field(
        description="By component, the pages that are whole in the region; what the others have there is undefined."
    )
    timing_ms: dict[str, float] = Field(description="Milliseconds of the job: `queued`, `probe`, `load` and `total`.")
    keys: AskedKeys = None


class LookupAnswer(BaseModel):
    """What a prefetch would find and be granted now."""

    model: Model
    page_tokens: PageTokens
    pages: LookupLengths = Field(description="In pages.")
    tokens: LookupLengths = Field(description=InTokens)
    keys: AskedKeys = None
    boundaries: list[int] | None = Field(
        default=None,
        description="All boundaries above `device_pages` up to `stored`, ascending, of a model with tail components.",
    )


class LeasedAnswer(BaseModel):
    """What of a prefix is leased."""

    model: Model
    page_tokens: PageTokens
    pages: LengthsAnswer = Field(description="In pages.")
    tokens: LengthsAnswer = Field(description=InTokens)
    keys: AskedKeys = None
    lease: LeaseAnswer | None = Field(default=None, description="Absent where nothing could be leased.")
    slots: Slots = None


class PinnedAnswer(BaseModel):
    """What of a prefix is pinned."""

    id: str | None = Field(default=None, description="To end the pin. Absent where nothing could be pinned.")
    model: Model
    page_tokens: PageTokens
    pages: LengthsAnswer = Field(description="In pages; `ready` are pinned.")
    tokens: LengthsAnswer = Field(description=InTokens)
    expires_in_ms: ExpiresInMs
    keys: AskedKeys = None


class EvictedAnswer(BaseModel):
    """What became of the resident pages of a prefix."""

    model: Model
    evicted: int = Field(description="Pages that are evicted before others from now on.")
    kept: int = Field(description="Pages that somebody holds, which stay as they are.")
    keys: AskedKeys = None


class HintAnswer(BaseModel):
    """What became of an action. The members below `reason` are there by its type."""

    action_id: str = Field(description="That of the action.")
    action_type: str = Field(description="That of the action.")
    outcome: HintOutcome = Field(description="In one word.")
    reason: str | None = Field(description="A reason of a shortfall, or the type of an error; null with `accepted`.")
    detail: str | None = Field(default=None, description="For people, where it is `rejected`.")
    request_id: str | None = Field(default=None, description="The prefetch, to follow it.")
    state: JobStateName | None = Field(default=None, description="Of the prefetch.")
    pin_id: str | None = Field(default=None, description="The pin, to end it.")
    expect_id: str | None = Field(default=None, description="The expectation, to end it.")
    expires_in_ms: int | None = Field(default=None, description="Milliseconds that it lives from now.")
    marked: int | None = Field(default=None, description="Pages that are evicted after others for the expectation.")
    pages: LengthsAnswer | None = Field(default=None, description="Of the prefetch or the pin, in pages.")
    shortfall: dict[str, int] | None = Field(default=None, description="Of the prefetch: pages by reason.")
    demoted: int | None = Field(default=None, description="Pages that are evicted before others from now on.")
    kept: int | None = Field(default=None, description="Pages that somebody holds, which stay as they are.")


class HintsAnswer(BaseModel):
    """What became of an envelope."""

    protocol_version: str = Field(description="That of the envelope.")
    message_id: str = Field(description="That of the envelope.")
    actions: list[HintAnswer] = Field(description="Each action, in order.")


class HashAnswer(BaseModel):
    """The page keys of a prompt."""

    model: Model
    scheme: str = Field(description="How they are made.")
    page_tokens: PageTokens
    pages: int = Field(description="Whole pages of the prompt.")
    keys: list[PageKey] = Field(description="Their keys, in order.")


class RenewAnswer(BaseModel):
    """A lease that lives on."""

    lease: LeaseAnswer = Field(description="The lease.")


class WriteAnswer(BaseModel):
    """Slots that the caller may write to."""

    id: str = Field(description="To commit or drop it.")
    model: Model
    stored: list[int] = Field(description="Indexes of pages that are there already, in every component asked for.")
    granted: int = Field(description="Pages from this one on got no slot now.")
    reason: Literal["host_capacity", "back_pressure"] | None = Field(
        description="Why `granted` is short: no room in the pool, or L3 is behind."
    )
    slots: dict[str, list[int | None]] = Field(
        description="By component, one entry a page, or a tail index as asked; null where nothing is to be written."
    )
    instance: Instance
    generation: Generation
    expires_in_ms: int = Field(description="Milliseconds to commit it in.")


class WriteCounts(BaseModel):
    """How far the pages of a write have come."""

    committed: int = Field(description="Pages published by the commit.")
    durable: int = Field(description="Of them, pages that are in L3.")
    failed: int = Field(description="Of them, pages that L3 did not take after all attempts.")
    duplicate: int = Field(description="Pages that had become resident otherwise; their first copy stays.")
    parts_left: int = Field(description="Callers that have yet to commit their part before anything is published.")


class RegionAnswer(BaseModel):
    """Where the slots of a component lie: slot i begins at `offset` + i x `slot_bytes`, shards one after another."""

    offset: int = Field(description="Bytes from the beginning of the file.")
    slot_bytes: int = Field(description="Bytes from one slot to the next.")
    slots: int = Field(description="How many there are.")
    shards: int = Field(description="Shards of a page.")
    shard_bytes: int = Field(description="Bytes from one shard to the next.")
    bytes: int = Field(description="Bytes of a shard that are payload.")
    table_offset: int = Field(description="Where its part of the slot table begins, in bytes.")


class PoolAnswer(BaseModel):
    """The pool file."""

    path: str = Field(description="Where to map it from.")
    bytes: int = Field(description="Its size.")
    instance: Instance
    generation: Generation
    regions: dict[str, dict[str, RegionAnswer]] = Field(description="By model and component.")


class ComponentAnswer(BaseModel):
    """One kind of payload of a page."""

    name: str = Field(description="Its name.")
    bytes: int = Field(description="Bytes of a page and shard.")
    shards: int = Field(description="Shards of a page.")
    covers: Literal["every_page", "tail"] = Field(description="Which pages need it.")
    window: int = Field(description="Pages at the end of a prefix that need it, of a tail component; else 0.")
    slots: int = Field(description="Slots it has in the pool.")


class ModelAnswer(BaseModel):
    """A configured model."""

    name: str = Field(description="Its name.")
    fingerprint: str = Field(description="Of its layout: what another layout has written is not read.")
    page_tokens: PageTokens
    shards: int = Field(description="Ranks that each have a part of a page.")
    dtype: str = Field(description="As configured.")
    layout: str = Field(description="As configured.")
    hash: str | None = Field(description="How its page keys come from token ids; null where that is not configured.")
    components: list[ComponentAnswer] = Field(description="What a page consists of.")


class ModelsAnswer(BaseModel):
    """The configured models."""

    models: list[ModelAnswer] = Field(description="In the order of the configuration.")


class InfoAnswer(BaseModel):
    """What this service is."""

    version: str = Field(description="Of Forestage.")
    storage: str = Field(description="The kind of L3.")
    storage_state: Literal["up", "degraded"] = Field(description="Whether L3 answers.")
    pinned: str = Field(description="How the pool is pinned: `cuda`, `mlock` or `none`.")
    hugepages: str = Field(description="What the pool is made of: `hugetlbfs`, `transparent` or `none`.")
    uptime_s: float = Field(description="Seconds since the start.")
    instance: Instance
    generation: Generation
    models: list[str] = Field(description="Names of the configured models.")
    regions_uds: str = Field(description="Where regions are registered, `server.regions_uds`; empty: nowhere.")


class Health(BaseModel):
    """How it is."""

    status: str = Field(description="`ok` or `ready`.")
    storage: Literal["up", "degraded"] | None = Field(default=None, description="Whether L3 answers; `/readyz` only.")
