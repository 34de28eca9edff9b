"""What the status page and `forestage top` show: everything at one moment, in a size that no pool or load changes.

Law: the numbers are those of `/metrics` at the same moment: slots by state, jobs by state, and pages since the start.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from forestage.core.engine import Engine
from forestage.core.job import Job, JobState
from forestage.core.pool_map import SLOT_STATES, PoolMap, draw_map, slot_counts
from forestage.observe.history import BUCKET_S, History

__all__ = ["MAX_CELLS", "MAX_FINISHED", "MAX_RUNNING", "Status"]

#: Cells of all maps together, and the fewest a component gets: many components share less each.
MAX_CELLS = 512
_MIN_CELLS = 16
MAX_RUNNING = 24
MAX_FINISHED = 12
_MAX_COMPONENTS = 64
#: Maps are drawn so often at most, in seconds, whoever looks: only they cost more than reading numbers.
_MAPS_EVERY_S = 0.25

_RUNNING_FIRST = {JobState.LOADING: 0, JobState.PROBING: 1, JobState.QUEUED: 2}


class Status:
    """Describes an engine and its history. To be asked on the thread that calls the engine."""

    def __init__(self, engine: Engine, history: History) -> None:
        self._engine = engine
        self._history = history
        self._maps: dict[tuple[str, int], PoolMap] = {}
        self._maps_at = float("-inf")

    def describe(self, tenant: str | None) -> dict[str, Any]:
        """Return the parts of the feed that change; single jobs are only the tenant's if one is named."""
        engine, history, now = self._engine, self._history, self._history.clock()
        states = Counter(job.state for job in engine.live)
        mine = [job for job in engine.live if tenant in {None, job.request.tenant}]
        shown = heapq.nsmallest(MAX_RUNNING, mine, key=lambda job: (_RUNNING_FIRST[job.state], job.timing.arrived))
        return {
            "jobs": {state.value: states[state] for state in (JobState.QUEUED, JobState.PROBING, JobState.LOADING)},
            "running": [_describe_running(job, now) for job in shown],
            "running_not_shown": len(mine) - len(shown),
            "finished": [
                {
                    "request_id": job.request_id,
                    "model": job.model,
                    "outcome": job.outcome,
                    "device_pages": job.device_pages,
                    "pages": asdict(job.lengths),
                    "shortfall": job.shortfall,
                    "total_ms": round(job.total_ms, 3),
                    "ago_ms": round((now - job.ended) * 1e3),
                }
                for job, _ in zip(history.finished(tenant), range(MAX_FINISHED), strict=False)
            ],
            "pool": list(self._pool(now)),
            "inflight_bytes": engine.admission.promised,
            "inflight_limit_bytes": engine.admission.budget_bytes,
            "leases": len(engine.leases),
            "pins": len(engine.pins),
            "totals": {
                "jobs": dict(history.outcomes),
                "requested_pages": history.total.requested,
                "ready_pages": history.total.ready,
                "loaded_pages": history.loaded,
                "joined_pages": history.joined,
                "shortfall_pages": dict(history.total.shortfall),
                "read_bytes": history.total.read_bytes,
                "errors": {kind: count for kind, count in history.errors.items() if count},
            },
            "recent": {
                "bucket_ms": int(BUCKET_S * 1e3),
                "buckets": [
                    {
                        "jobs": bucket.jobs,
                        "requested_pages": bucket.requested,
                        "ready_pages": bucket.ready,
                        "shortfall_pages": dict(bucket.shortfall),
                        "read_bytes": bucket.read_bytes,
                        "errors": bucket.errors,
                    }
                    for bucket in history.buckets()
                ],
            },
        }

    def _pool(self, now: float) -> Iterator[dict[str, Any]]:
        names = [(model, c) for model, pool in self._engine.pools.items() for c in range(len(pool.layout.components))][
            :_MAX_COMPONENTS
        ]
        if now - self._maps_at >= _MAPS_EVERY_S:
            max_cells = max(_MIN_CELLS, MAX_CELLS // len(names))
            self._maps = {(model, c): draw_map(self._engine.pools[model], c, max_cells) for model, c in names}
            self._maps_at = now
        for model, c in names:
            pool, drawn = self._engine.pools[model], self._maps[model, c]
            component = pool.layout.components[c]
            yield {
                "model": model,
                "component": component.name,
                "slots": pool.slots[c].capacity,
                "slot_bytes": component.slot_bytes,
                "states": slot_counts(pool, c),
                "evicted_pages": pool.index[c].evicted,
                "map": {
                    "states": SLOT_STATES,
                    "cell_slots": drawn.cell_slots,
                    "exact": drawn.exact,
                    "cells": drawn.cells,
                },
            }


def _describe_running(job: Job, now: float) -> dict[str, Any]:
    return {
        "request_id": job.request.request_id,
        "model": job.layout.name,
        "state": job.state.value,
        "device_pages": job.request.device_pages,
        "pages": asdict(job.lengths()),
        "contiguous": job.contiguous,
        "age_ms": round((now - job.timing.arrived) * 1e3, 3),
        "deadline_in_ms": None if job.deadline is None else round((job.deadline - now) * 1e3, 3),
    }
