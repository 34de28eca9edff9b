"""The route that brings a prefix and copies it into memory that another process has passed."""

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from forestage.api.answers import FillAnswer
from forestage.api.auth import REFUSALS, RoleRoute, needs, tenant_of
from forestage.api.bodies import FillBody, check, request_schema
from forestage.api.codec import answer
from forestage.api.context import Context
from forestage.api.describe import describe_fill
from forestage.api.problem_types import problem_answers
from forestage.api.prompts import asked_keys
from forestage.api.reading import PREFIX_PROBLEMS, read_prefix
from forestage.api.waiting import client_left
from forestage.core.fill_target import FillTarget, check_target, check_targets
from forestage.core.job import PrefetchRequest
from forestage.core.layout import ModelLayout
from forestage.core.roles import Role
from forestage.prefetch.fills import Fill, Fills

__all__ = ["build_fills"]


def build_fills(context: Context) -> APIRouter:
    """Build `/v1/fills` over a running service."""
    router = APIRouter(prefix="/v1", responses=REFUSALS, route_class=RoleRoute)
    config, service = context.config, context.service

    @router.post(
        "/fills",
        summary="Bring a prefix, and copy it into a region that was registered",
        response_model=FillAnswer,
        response_model_exclude_none=True,
        responses=problem_answers(*PREFIX_PROBLEMS, "region-gone", "queue-full", "limit-reached"),
        openapi_extra=needs(Role.WRITE) | request_schema(FillBody),
    )
    async def fill_region(request: Request) -> Response:
        arrived = service.now()
        raw, keys = await read_prefix(request, context)
        body = check(FillBody, raw, len(keys))
        layout = service.engine.pool(body.model).layout
        targets = _targets(layout, body)
        tenant = tenant_of(request, body)
        memory = service.regions.find(body.region)
        check_targets(targets, len(keys), memory.ends)
        wanted = PrefetchRequest(
            request_id=f"fill-{uuid.uuid4().hex}",
            model=body.model,
            keys=keys,
            device_pages=body.device_pages,
            min_pages=config.prefetch.min_pages if body.min_pages is None else body.min_pages,
            priority=body.priority,
            deadline_ms=config.prefetch.deadline_ms if body.deadline_ms is None else body.deadline_ms,
            lease_ms=min(config.lease.default_ms, config.lease.max_ms),
            tenant=tenant,
        )
        job, _ = service.submit(wanted, arrived)
        fill = Fill(job, memory, targets)
        try:
            await _run(service.fills, fill, request)
            filled = {
                layout.components[t.component].name: pages for t, pages in zip(targets, fill.filled(), strict=True)
            }
        finally:
            service.forget(wanted.request_id)
        described = describe_fill(job, filled, service.spans_ms(job))
        return answer(request, {**described, **asked_keys(request, body, keys)})

    return router


async def _run(fills: Fills, fill: Fill, request: Request) -> None:
    """Run a fill; stop it when its client leaves. The body has been read."""
    left = asyncio.create_task(client_left(request.receive))
    left.add_done_callback(lambda _: fill.stop())
    try:
        await fills.run(fill)
    finally:
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)


def _targets(layout: ModelLayout, body: FillBody) -> Sequence[FillTarget]:
    """Return where each component goes; raises BadRequestError."""
    given: dict[str, Any] = body.targets
    return [check_target(layout, name, t.shard, t.first, t.run_bytes, t.offsets) for name, t in given.items()]
