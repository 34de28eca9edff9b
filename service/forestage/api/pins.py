"""The routes that say what should stay in the pool and what need not: pins and evict."""

from fastapi import APIRouter, Request, Response

from forestage.api.answers import EvictedAnswer, PinnedAnswer
from forestage.api.auth import REFUSALS, RoleRoute, bound_tenant, needs, tenant_of
from forestage.api.bodies import PinBody, TenantBody, check, request_schema
from forestage.api.codec import answer
from forestage.api.context import Context
from forestage.api.describe import describe_pin
from forestage.api.problem_types import problem_answers
from forestage.api.prompts import asked_keys
from forestage.api.reading import PREFIX_PROBLEMS, read_prefix
from forestage.core.roles import Role

__all__ = ["build_pins"]


def build_pins(context: Context) -> APIRouter:
    """Build the routes over a running service."""
    router = APIRouter(prefix="/v1", responses=REFUSALS, route_class=RoleRoute)
    config, service = context.config, context.service

    @router.post(
        "/pins",
        summary="Keep what is resident of a prefix for a while",
        status_code=201,
        response_model=PinnedAnswer,
        response_model_exclude_none=True,
        responses=problem_answers(*PREFIX_PROBLEMS, "limit-reached")
        | {200: {"model": PinnedAnswer, "description": "nothing to pin"}},
        openapi_extra=needs(Role.WRITE) | request_schema(PinBody),
    )
    async def pin_prefix(request: Request) -> Response:
        raw, keys = await read_prefix(request, context)
        body = check(PinBody, raw, len(keys))
        layout = service.engine.pool(body.model).layout
        ttl_ms = min(body.ttl_ms, config.lease.max_pin_ms)
        lengths, pin = service.pin(body.model, keys, body.device_pages, ttl_ms, tenant_of(request, body))
        remaining = 0 if pin is None else service.remaining_ms(pin)
        pinned = {**describe_pin(layout, lengths, pin, remaining), **asked_keys(request, body, keys)}
        return answer(request, pinned, 200 if pin is None else 201)

    @router.delete(
        "/pins/{pin_id}",
        summary="End a pin",
        status_code=204,
        openapi_extra=needs(Role.WRITE),
    )
    async def unpin(request: Request, pin_id: str) -> Response:
        service.unpin(pin_id, bound_tenant(request))
        return Response(status_code=204)

    @router.post(
        "/evict",
        summary="Let the resident pages of a prefix be evicted first",
        response_model=EvictedAnswer,
        responses=problem_answers(*PREFIX_PROBLEMS),
        openapi_extra=needs(Role.ADMIN) | request_schema(TenantBody),
    )
    async def evict(request: Request) -> Response:
        raw, keys = await read_prefix(request, context)
        body = check(TenantBody, raw, len(keys))
        tenant_of(request, body)  # to refuse a wrong name here too; whoever knows the keys may demote them
        evicted, kept = service.engine.demote(body.model, keys, body.device_pages)
        counts = {"model": body.model, "evicted": evicted, "kept": kept}
        return answer(request, {**counts, **asked_keys(request, body, keys)})

    return router
