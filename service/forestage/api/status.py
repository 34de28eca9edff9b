"""`/v1/status`, which the status page and `forestage top` show, and what happened when to one job."""

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from forestage.api.auth import REFUSALS, RoleRoute, bound_tenant, needs
from forestage.api.codec import answer
from forestage.api.context import Context
from forestage.api.problem_types import problem_answers
from forestage.api.status_schemas import StatusAnswer, TimelineAnswer
from forestage.core.job import Job
from forestage.core.roles import Role
from forestage.core.trace_context import trace_id_of
from forestage.observe.status import Status

__all__ = ["build_status"]


def build_status(context: Context) -> APIRouter:
    """Build `/v1/status` and `/v1/prefetch/{request_id}/timeline`."""
    router = APIRouter(prefix="/v1", responses=REFUSALS, route_class=RoleRoute)
    service, history = context.service, context.history
    status = Status(service.engine, history)

    @router.get(
        "/status",
        summary="Show the service at work, as its page does",
        response_model=StatusAnswer,
        openapi_extra=needs(Role.READ),
    )
    async def get_status(request: Request) -> Response:
        facts = {
            "version": context.version,
            "state": "stopping" if context.stopping else "ready",
            "uptime_s": round(time.monotonic() - context.started, 3),
            "pool_path": context.pool.path,
            "pool_bytes": context.pool.size,
            "pinned": context.pool.pinned,
            "storage": {
                "kind": context.config.storage.kind,
                "state": context.storage_state,
                "since_ms": round((history.clock() - history.state_since) * 1e3),
            },
        }
        return answer(request, facts | status.describe(bound_tenant(request)))

    @router.get(
        "/prefetch/{request_id}/timeline",
        summary="Say what happened when to a prefetch",
        response_model=TimelineAnswer,
        response_model_exclude_none=True,
        responses=problem_answers("unknown-job"),
        openapi_extra=needs(Role.READ),
    )
    async def get_timeline(request: Request, request_id: str) -> Response:
        return answer(request, _describe_timeline(service.find(request_id, bound_tenant(request))))

    return router


def _describe_timeline(job: Job) -> dict[str, Any]:
    moments: list[dict[str, Any]] = []
    for moment in job.timeline.moments():
        at_ms = round((moment.at - job.timing.arrived) * 1e3, 3)
        moments.append({"at_ms": at_ms, "event": moment.event.value, "pages": moment.pages})
        if moment.reason is not None:
            moments[-1]["reason"] = str(moment.reason)
    return {
        "request_id": job.request.request_id,
        "model": job.layout.name,
        "state": job.state.value,
        "outcome": None if job.outcome is None else job.outcome.value,
        "trace_id": trace_id_of(job.request.traceparent) or None,
        "moments": moments,
        "cuts": job.timeline.num_cuts,
    }
