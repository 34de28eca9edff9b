"""Shapes of the status feed and of timelines, for the OpenAPI document."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from forestage.api.answers import LengthsAnswer

__all__ = ["StatusAnswer", "TimelineAnswer"]

RequestId = Annotated[str, Field(description="The job's name.")]
Model = Annotated[str, Field(description="The model's name.")]
DevicePages = Annotated[int, Field(description="Leading pages that are on the GPU.")]
Lengths = Annotated[LengthsAnswer, Field(description="In pages.")]
Shortfall = Annotated[dict[str, int], Field(description="Pages by reason.")]
ReadBytes = Annotated[int, Field(description="Bytes read from L3.")]


class JobCounts(BaseModel):
    """Jobs that are not done, by state."""

    queued: int = Field(description="Jobs that wait for admission.")
    probing: int = Field(description="Jobs that wait for what L3 says.")
    loading: int = Field(description="Jobs whose pages are read.")


class RunningJob(BaseModel):
    """A job that is not done."""

    request_id: RequestId
    model: Model
    state: Literal["queued", "probing", "loading"] = Field(description="How far it is.")
    device_pages: DevicePages
    pages: Lengths
    contiguous: int = Field(description="Pages that have come without a gap.")
    age_ms: float = Field(description="Milliseconds since it arrived.")
    deadline_in_ms: float | None = Field(description="Milliseconds to its deadline; null without one.")


class FinishedJob(BaseModel):
    """A job that is done."""

    request_id: RequestId
    model: Model
    outcome: str = Field(description="How it ended.")
    device_pages: DevicePages
    pages: Lengths
    shortfall: Shortfall
    total_ms: float = Field(description="Milliseconds from arrival to end.")
    ago_ms: int = Field(description="Milliseconds since it ended.")


class SlotMap(BaseModel):
    """The slots of a component as a row of cells, each a run of neighbouring slots."""

    states: list[str] = Field(description="What the numbers of a cell count.")
    cell_slots: int = Field(description="Slots of a cell.")
    exact: bool = Field(description="Whether all slots were looked at, or some of each cell.")
    cells: list[list[int]] = Field(description="By cell, slots by state, in the order of `states`.")


class ComponentStatus(BaseModel):
    """The part of a component in the pool."""

    model: Model
    component: str = Field(description="The component's name.")
    slots: int = Field(description="How many it has.")
    slot_bytes: int = Field(description="Bytes from one to the next.")
    states: dict[str, int] = Field(description="Slots by state; they add up to `slots`.")
    evicted_pages: int = Field(description="Pages evicted since the start.")
    map: SlotMap = Field(description="Where they are.")


class Totals(BaseModel):
    """What there was since the start."""

    jobs: dict[str, int] = Field(description="Finished jobs by outcome.")
    requested_pages: int = Field(description="Pages asked for by finished jobs.")
    ready_pages: int = Field(description="Of them, pages that were ready.")
    loaded_pages: int = Field(description="Pages that jobs read.")
    joined_pages: int = Field(description="Pages whose read another job had begun.")
    shortfall_pages: Shortfall
    read_bytes: ReadBytes
    errors: dict[str, int] = Field(description="Failed reads by kind.")


class BucketAnswer(BaseModel):
    """What there was in a span of time."""

    jobs: int = Field(description="Jobs that ended.")
    requested_pages: int = Field(description="Pages they asked for.")
    ready_pages: int = Field(description="Of them, pages that were ready.")
    shortfall_pages: Shortfall
    read_bytes: ReadBytes
    errors: int = Field(description="Failed reads.")


class Recent(BaseModel):
    """The last five minutes."""

    bucket_ms: int = Field(description="Milliseconds of a bucket.")
    buckets: list[BucketAnswer] = Field(description="The oldest first; the last one is not over yet.")


class StorageStatus(BaseModel):
    """What is known of L3."""

    kind: str = Field(description="As configured.")
    state: Literal["up", "degraded"] = Field(description="Whether it answers.")
    since_ms: int = Field(description="Milliseconds since that changed, or since the start.")


class StatusAnswer(BaseModel):
    """The service at work, at one moment."""

    version: str = Field(description="Of Forestage.")
    state: Literal["ready", "stopping"] = Field(description="Whether it takes prefetches.")
    uptime_s: float = Field(description="Seconds since the start.")
    pool_path: str = Field(description="Where the pool is.")
    pool_bytes: int = Field(description="Its size.")
    pinned: str = Field(description="How it is pinned: `cuda`, `mlock` or `none`.")
    storage: StorageStatus = Field(description="How L3 is.")
    jobs: JobCounts = Field(description="Jobs that are not done.")
    running: list[RunningJob] = Field(description="Some of them.")
    running_not_shown: int = Field(description="How many more there are.")
    finished: list[FinishedJob] = Field(description="Those that ended last.")
    pool: list[ComponentStatus] = Field(description="Every component of every model.")
    inflight_bytes: int = Field(description="Bytes promised to jobs that are not done.")
    inflight_limit_bytes: int = Field(description="At most so many (`prefetch.max_inflight_fraction`).")
    leases: int = Field(description="Leases that live.")
    pins: int = Field(description="Pins that live.")
    totals: Totals = Field(description="Since the start.")
    recent: Recent = Field(description="Of the last five minutes.")


class MomentAnswer(BaseModel):
    """Something that happened to a job."""

    at_ms: float = Field(description="Milliseconds from its arrival.")
    event: Literal["arrived", "admitted", "probe", "grant", "first_page", "last_page", "cut", "settle", "done"] = Field(
        description="What."
    )
    pages: int = Field(description="A length or a count, by the event.")
    reason: str | None = Field(default=None, description="Why, of a cut.")


class TimelineAnswer(BaseModel):
    """What happened when to a job."""

    request_id: RequestId
    model: Model
    state: Literal["queued", "probing", "loading", "done"] = Field(description="How far it is.")
    outcome: str | None = Field(description="How it ended; null until it is done.")
    trace_id: str | None = Field(description="Of the caller's `traceparent`; null without one.")
    moments: list[MomentAnswer] = Field(description="In order of time.")
    cuts: int = Field(description="How often its grant was cut.")
