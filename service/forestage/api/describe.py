"""What answers say of jobs, leases, models and the pool, in the contract's words."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from forestage.core.geometry import Geometry, Region
from forestage.core.job import Job, Lengths
from forestage.core.layout import ModelLayout
from forestage.core.leases import Lease
from forestage.core.plan import Plan
from forestage.core.write import Write

__all__ = [
    "describe_fill",
    "describe_job",
    "describe_lease",
    "describe_lookup",
    "describe_model",
    "describe_pin",
    "describe_progress",
    "describe_regions",
    "describe_write",
]


def _pages_and_tokens(lengths: dict[str, int], layout: ModelLayout) -> dict[str, Any]:
    tokens = {name: pages * layout.page_tokens for name, pages in lengths.items()}
    return {"page_tokens": layout.page_tokens, "pages": lengths, "tokens": tokens}


def describe_lease(layout: ModelLayout, lengths: Lengths, lease: Lease | None, remaining_ms: int) -> dict[str, Any]:
    """Describe a leased prefix. Slots are shown only while the lease lives: afterwards they may hold anything."""
    answer: dict[str, Any] = {"model": layout.name, **_pages_and_tokens(asdict(lengths), layout)}
    if lease is not None and lease.alive and remaining_ms > 0:
        answer["lease"] = {"id": lease.id, "expires_in_ms": remaining_ms}
        answer["slots"] = {c.name: slots for c, slots in zip(layout.components, lease.slots, strict=True)}
    return answer


def describe_pin(layout: ModelLayout, lengths: Lengths, pin: Lease | None, remaining_ms: int) -> dict[str, Any]:
    """Describe a pinned prefix; without an `id` if nothing of it could be pinned."""
    answer = {"model": layout.name, **_pages_and_tokens(asdict(lengths), layout), "expires_in_ms": remaining_ms}
    return answer if pin is None else {"id": pin.id, **answer}


def describe_job(job: Job, remaining_ms: int, timing_ms: dict[str, float]) -> dict[str, Any]:
    """Describe a prefetch as it is now."""
    loaded, joined = job.count_pages()
    return {
        "request_id": job.request.request_id,
        "state": job.state.value,
        "outcome": None if job.outcome is None else job.outcome.value,
        **describe_lease(job.layout, job.lengths(), job.lease, remaining_ms),
        "loaded": loaded,
        "joined": joined,
        "shortfall": {reason.value: pages for reason, pages in job.shortfall.items()},
        "timing_ms": {name: round(ms, 3) for name, ms in timing_ms.items()},
    }


def describe_fill(job: Job, filled: Mapping[str, range], timing_ms: dict[str, float]) -> dict[str, Any]:
    """Describe a job that is over, and what of its pages was copied; no slots, since nobody holds them any more."""
    described = describe_job(job, 0, timing_ms)
    for name in ("request_id", "state"):
        del described[name]
    return {**described, "filled": {name: {"first": p.start, "pages": len(p)} for name, p in filled.items()}}


def describe_lookup(layout: ModelLayout, plan: Plan, boundaries: list[int]) -> dict[str, Any]:
    """Describe what a prefetch would find and be granted; the boundaries only where they are not all lengths."""
    pages = {
        "requested": plan.requested,
        "host": plan.host,
        "stored": plan.stored,
        "restorable": plan.restorable,
        "grantable": plan.granted,
    }
    answer = {"model": layout.name, **_pages_and_tokens(pages, layout)}
    return {**answer, "boundaries": boundaries} if layout.tails else answer


def describe_write(write: Write, part: int, remaining_ms: int) -> dict[str, Any]:
    """Describe a reservation to who fills a part of it; valid while it is open."""
    return {
        "id": write.id_of(part),
        "model": write.layout.name,
        "stored": write.stored,
        "granted": write.granted,
        "reason": None if write.reason is None else write.reason.value,
        "slots": {component.name: write.slots_of(c) for c, component in enumerate(write.layout.components)},
        "expires_in_ms": remaining_ms,
    }


def describe_progress(write: Write) -> dict[str, int]:
    """Describe how far the pages of a write have come, in pages."""
    return {
        "committed": write.committed,
        "durable": write.durable,
        "failed": write.failed,
        "duplicate": write.duplicate,
        "parts_left": write.parts_left,
    }


def describe_model(layout: ModelLayout, geometry: Geometry) -> dict[str, Any]:
    """Describe a model's layout and what of the pool it has."""
    return {
        "name": layout.name,
        "fingerprint": layout.fingerprint,
        "page_tokens": layout.page_tokens,
        "shards": layout.shards,
        "dtype": layout.dtype,
        "layout": layout.layout,
        "components": [
            {
                "name": c.name,
                "bytes": c.bytes,
                "shards": c.shards,
                "covers": c.covers.value,
                "window": c.window,
                "slots": geometry.region(layout.name, c.name).slots,
            }
            for c in layout.components
        ],
    }


def _describe_region(region: Region) -> dict[str, int]:
    component = region.component
    return {
        "offset": region.offset,
        "slot_bytes": component.slot_bytes,
        "slots": region.slots,
        "shards": component.shards,
        "shard_bytes": component.shard_bytes,
        "bytes": component.bytes,
        "table_offset": region.table_offset,
    }


def describe_regions(geometry: Geometry) -> dict[str, dict[str, dict[str, int]]]:
    """Describe where each component's slots lie in the pool file; offsets and strides in bytes."""
    regions: dict[str, dict[str, dict[str, int]]] = {}
    for region in geometry.regions:
        regions.setdefault(region.model.name, {})[region.component.name] = _describe_region(region)
    return regions
