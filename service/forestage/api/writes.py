"""The routes of writes: reserve slots, commit or drop them, and see what of them is in L3."""

from collections.abc import Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from forestage.api.answers import WriteAnswer, WriteCounts
from forestage.api.auth import REFUSALS, RoleRoute, bound_tenant, needs, tenant_of
from forestage.api.bodies import MAX_WAIT_MS, WriteBody, check, request_schema
from forestage.api.codec import answer
from forestage.api.context import Context
from forestage.api.describe import describe_progress, describe_write
from forestage.api.problem_types import problem_answers
from forestage.api.reading import KEYS_PROBLEMS, read_keys
from forestage.api.waiting import wait_for_write
from forestage.core.errors import BadRequestError
from forestage.core.layout import ModelLayout
from forestage.core.roles import Role
from forestage.core.write import WriteState
from forestage.core.write_parts import Share

__all__ = ["build_writes"]

WaitMs = Annotated[int, Query(ge=0, le=MAX_WAIT_MS, description="wait so many milliseconds for all to be in L3")]


def build_writes(context: Context) -> APIRouter:
    """Build `/v1/writes` over a running service."""
    router = APIRouter(prefix="/v1/writes", responses=REFUSALS, route_class=RoleRoute)
    config, service = context.config, context.service

    @router.post(
        "",
        summary="Reserve slots for pages that the caller will put there",
        status_code=201,
        response_model=WriteAnswer,
        responses=problem_answers(*KEYS_PROBLEMS, "request-id-conflict", "part-taken", "limit-reached"),
        openapi_extra=needs(Role.WRITE) | request_schema(WriteBody),
    )
    async def begin_write(request: Request) -> Response:
        raw, keys = await read_keys(request, config)
        body = check(WriteBody, raw)
        tails = _by_component(service.engine.pool(body.model).layout, body.tails, len(keys))
        write = await service.begin_write(body.model, keys, tails, tenant_of(request, body), _share(body))
        place = {"instance": context.pool.instance, "generation": context.pool.generation}
        return answer(request, {**describe_write(write, body.part, service.write_remaining_ms(write)), **place}, 201)

    @router.post(
        "/{write_id}/commit",
        summary="Publish the pages of a write: resident now, in L3 behind",
        response_model=WriteCounts,
        responses=problem_answers("unknown-write", "write-gone"),
        openapi_extra=needs(Role.WRITE),
    )
    async def commit_write(request: Request, write_id: str) -> Response:
        service.find_write(write_id, bound_tenant(request))
        return answer(request, describe_progress(service.commit_write(write_id)))

    @router.get(
        "/{write_id}",
        summary="Say what of a write is in L3, at once or when all of it is",
        response_model=WriteCounts,
        responses=problem_answers("unknown-write", "write-gone", "invalid-request"),
        openapi_extra=needs(Role.READ),
    )
    async def get_write(request: Request, write_id: str, wait_ms: WaitMs = 0) -> Response:
        write = service.find_write(write_id, bound_tenant(request))
        await wait_for_write(service, write, wait_ms, request.receive)
        if write.state is WriteState.EXPIRED:
            service.find_write(write_id)  # says how it ended
        return answer(request, describe_progress(write))

    @router.delete(
        "/{write_id}",
        summary="Give the slots of a write back, or forget a committed one",
        status_code=204,
        openapi_extra=needs(Role.WRITE),
    )
    async def drop_write(request: Request, write_id: str) -> Response:
        service.drop_write(write_id, bound_tenant(request))
        return Response(status_code=204)

    return router


def _share(body: WriteBody) -> Share | None:
    """Return which part of a write is asked for, None for a write of one caller; raises BadRequestError."""
    if body.part >= body.parts:
        raise BadRequestError(f"part: {body.part} is none of {body.parts} parts")
    if (body.request_id is not None) != (body.parts > 1):
        raise BadRequestError("request_id: goes with parts above 1, and those with it")
    return None if body.request_id is None else Share(body.request_id, body.part, body.parts)


def _by_component(layout: ModelLayout, tails: Mapping[str, Sequence[int]], num_pages: int) -> dict[int, list[int]]:
    """Return page indexes by index of their tail component; raises BadRequestError."""
    component_of = {layout.components[c].name: c for c in layout.tails}
    by_component = {}
    for name, pages in tails.items():
        if name not in component_of:
            raise BadRequestError(f"tails: {name[:64]} is no tail component of this model")
        if len(set(pages)) != len(pages) or any(page >= num_pages for page in pages):
            raise BadRequestError(f"tails.{name}: must be different page indexes below {num_pages}")
        by_component[component_of[name]] = list(pages)
    return by_component
