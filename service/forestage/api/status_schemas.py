"""Shapes of the status feed and of timelines, for the OpenAPI document."""

from typing import Literal

from pydantic import BaseModel

from forestage.api.schemas import LengthsAnswer

__all__ = ["StatusAnswer", "TimelineAnswer"]


class _JobCounts(BaseModel):
    queued: int
    probing: int
    loading: int


class _RunningJob(BaseModel):
    request_id: str
    model: str
    state: Literal["queued", "probing", "loading"]
    device_pages: int
    pages: LengthsAnswer
    contiguous: int
    age_ms: float
    deadline_in_ms: float | None


class _FinishedJob(BaseModel):
    request_id: str
    model: str
    outcome: str
    device_pages: int
    pages: LengthsAnswer
    shortfall: dict[str, int]
    total_ms: float
    ago_ms: int


class _SlotMap(BaseModel):
    states: list[str]
    cell_slots: int
    exact: bool
    cells: list[list[int]]


class _ComponentStatus(BaseModel):
    model: str
    component: str
    slots: int
    slot_bytes: int
    states: dict[str, int]
    evicted_pages: int
    map: _SlotMap


class _Totals(BaseModel):
    jobs: dict[str, int]
    requested_pages: int
    ready_pages: int
    loaded_pages: int
    joined_pages: int
    shortfall_pages: dict[str, int]
    read_bytes: int
    errors: dict[str, int]


class _BucketAnswer(BaseModel):
    jobs: int
    requested_pages: int
    ready_pages: int
    shortfall_pages: dict[str, int]
    read_bytes: int
    errors: int


class _Recent(BaseModel):
    bucket_ms: int
    buckets: list[_BucketAnswer]


class _StorageStatus(BaseModel):
    kind: str
    state: Literal["up", "degraded"]
    since_ms: int


class StatusAnswer(BaseModel):
    version: str
    state: Literal["ready", "stopping"]
    uptime_s: float
    pool_path: str
    pool_bytes: int
    pinned: str
    storage: _StorageStatus
    jobs: _JobCounts
    running: list[_RunningJob]
    running_not_shown: int
    finished: list[_FinishedJob]
    pool: list[_ComponentStatus]
    inflight_bytes: int
    inflight_limit_bytes: int
    leases: int
    pins: int
    totals: _Totals
    recent: _Recent


class _MomentAnswer(BaseModel):
    at_ms: float
    event: Literal["arrived", "admitted", "probe", "grant", "first_page", "last_page", "cut", "settle", "done"]
    pages: int
    reason: str | None = None


class TimelineAnswer(BaseModel):
    request_id: str
    model: str
    state: Literal["queued", "probing", "loading", "done"]
    outcome: str | None
    trace_id: str | None
    moments: list[_MomentAnswer]
    cuts: int
