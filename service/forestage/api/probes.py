"""Liveness, readiness and metrics: answered on the loop, without storage, token or queue."""

from fastapi import APIRouter, Request, Response

from forestage.api.answers import Health
from forestage.api.auth import RoleRoute, needs
from forestage.api.codec import answer
from forestage.api.context import Context
from forestage.api.problem_types import problem_answers
from forestage.api.problems import problem

__all__ = ["build_probes"]


def build_probes(context: Context) -> APIRouter:
    """Build `/healthz`, `/readyz` and `/metrics`."""
    router = APIRouter(route_class=RoleRoute)

    @router.get(
        "/healthz",
        summary="Say that the event loop turns",
        response_model=Health,
        openapi_extra=needs(None),
    )
    async def healthz(request: Request) -> Response:
        return answer(request, {"status": "ok"})

    @router.get(
        "/readyz",
        summary="Say whether prefetches are taken",
        response_model=Health,
        responses=problem_answers("stopping", "pool-unlinked"),
        openapi_extra=needs(None),
    )
    async def readyz(request: Request) -> Response:
        if context.stopping:
            return problem(503, "stopping", "the service is stopping", storage=context.storage_state)
        if not context.pool.is_linked():
            return problem(503, "pool-unlinked", "the pool file is gone from its path", storage=context.storage_state)
        return answer(request, {"status": "ready", "storage": context.storage_state})

    @router.get(
        "/metrics",
        summary="Prometheus metrics",
        response_class=Response,
        openapi_extra=needs(None),
    )
    async def metrics(request: Request) -> Response:
        body, media_type = context.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": media_type})

    return router
