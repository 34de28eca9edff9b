"""The routes of CONTRACT section 4: prefetch, lookup, leases, pool, models, info."""

import time
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from forestage.api.answers import (
    InfoAnswer,
    LeasedAnswer,
    LookupAnswer,
    ModelsAnswer,
    PoolAnswer,
    PrefetchAnswer,
    RenewAnswer,
)
from forestage.api.auth import REFUSALS, RoleRoute, bound_tenant, needs, tenant_of
from forestage.api.bodies import MAX_WAIT_MS, LeaseBody, PrefetchBody, RenewBody, TenantBody, check, request_schema
from forestage.api.codec import answer, read_body
from forestage.api.context import Context
from forestage.api.describe import describe_job, describe_lease, describe_lookup, describe_model, describe_regions
from forestage.api.problem_types import problem_answers
from forestage.api.prompts import asked_keys
from forestage.api.reading import BODY_PROBLEMS, PREFIX_PROBLEMS, read_prefix
from forestage.api.waiting import wait_for_job
from forestage.core.job import Job, PrefetchRequest
from forestage.core.roles import Role
from forestage.core.trace_context import checked_traceparent

__all__ = ["build_router"]

WaitMs = Annotated[int, Query(ge=0, le=MAX_WAIT_MS, description="wait so many milliseconds for the job to be done")]


def build_router(context: Context) -> APIRouter:
    """Build the routes over a running service."""
    router = APIRouter(prefix="/v1", responses=REFUSALS, route_class=RoleRoute)
    config, service = context.config, context.service

    def describe(job: Job) -> dict[str, Any]:
        remaining = 0 if job.lease is None else service.remaining_ms(job.lease)
        return describe_job(job, remaining, service.spans_ms(job))

    @router.post(
        "/prefetch",
        summary="Bring a prefix into the host pool",
        response_model=PrefetchAnswer,
        responses=problem_answers(*PREFIX_PROBLEMS, "request-id-conflict", "queue-full", "limit-reached")
        | {202: {"model": PrefetchAnswer, "description": "not done yet"}},
        openapi_extra=needs(Role.WRITE) | request_schema(PrefetchBody),
    )
    async def start_prefetch(request: Request) -> Response:
        arrived = service.now()
        raw, keys = await read_prefix(request, context)
        body = check(PrefetchBody, raw, len(keys))
        wanted = PrefetchRequest(
            request_id=body.request_id or uuid.uuid4().hex,
            model=body.model,
            keys=keys,
            device_pages=body.device_pages,
            min_pages=config.prefetch.min_pages if body.min_pages is None else body.min_pages,
            priority=body.priority,
            deadline_ms=config.prefetch.deadline_ms if body.deadline_ms is None else body.deadline_ms,
            lease_ms=min(body.lease_ms or config.lease.default_ms, config.lease.max_ms),
            tenant=tenant_of(request, body),
            traceparent=checked_traceparent(request.headers.get("traceparent", "")),
        )
        job, new = service.submit(wanted, arrived)
        if not await wait_for_job(service, job, body.wait_ms, request.receive) and new:
            service.cancel(job)
        return answer(request, {**describe(job), **asked_keys(request, body, keys)}, 200 if job.done else 202)

    @router.get(
        "/prefetch/{request_id}",
        summary="Say how a prefetch stands, at once or when it is done",
        response_model=PrefetchAnswer,
        responses=problem_answers("unknown-job", "invalid-request"),
        openapi_extra=needs(Role.READ),
    )
    async def get_prefetch(request: Request, request_id: str, wait_ms: WaitMs = 0) -> Response:
        job = service.find(request_id, bound_tenant(request))
        await wait_for_job(service, job, wait_ms, request.receive)
        return answer(request, describe(job))

    @router.post(
        "/prefetch/{request_id}/finish",
        summary="Stop a prefetch now and keep what is ready",
        response_model=PrefetchAnswer,
        responses=problem_answers("unknown-job", "stopping"),
        openapi_extra=needs(Role.WRITE),
    )
    async def finish_prefetch(request: Request, request_id: str) -> Response:
        job = service.find(request_id, bound_tenant(request))
        service.finish(job)
        # It settles within prefetch.settle_ms; the generous bound only guards against a wedged loop.
        await wait_for_job(service, job, config.prefetch.settle_ms + 10_000, request.receive)
        return answer(request, describe(job))

    @router.delete(
        "/prefetch/{request_id}",
        summary="Cancel and forget a prefetch, release its lease",
        status_code=204,
        openapi_extra=needs(Role.WRITE),
    )
    async def delete_prefetch(request: Request, request_id: str) -> Response:
        service.forget(request_id, bound_tenant(request))
        return Response(status_code=204)

    @router.post(
        "/lookup",
        summary="Say what a prefetch would find and be granted",
        response_model=LookupAnswer,
        response_model_exclude_none=True,
        responses=problem_answers(*PREFIX_PROBLEMS),
        openapi_extra=needs(Role.READ) | request_schema(TenantBody),
    )
    async def lookup(request: Request) -> Response:
        raw, keys = await read_prefix(request, context)
        body = check(TenantBody, raw, len(keys))
        layout = service.engine.pool(body.model).layout
        plan, boundaries = await service.lookup(body.model, keys, body.device_pages, tenant_of(request, body))
        return answer(request, {**describe_lookup(layout, plan, boundaries), **asked_keys(request, body, keys)})

    @router.post(
        "/leases",
        summary="Lease what is resident of a prefix",
        response_model=LeasedAnswer,
        response_model_exclude_none=True,
        responses=problem_answers(*PREFIX_PROBLEMS, "limit-reached"),
        openapi_extra=needs(Role.WRITE) | request_schema(LeaseBody),
    )
    async def take_lease(request: Request) -> Response:
        raw, keys = await read_prefix(request, context)
        body = check(LeaseBody, raw, len(keys))
        layout = service.engine.pool(body.model).layout
        lease_ms = min(body.lease_ms or config.lease.default_ms, config.lease.max_ms)
        tenant = tenant_of(request, body)
        lengths, lease = service.take_lease(body.model, keys, body.device_pages, lease_ms, tenant)
        remaining = 0 if lease is None else service.remaining_ms(lease)
        leased = describe_lease(layout, lengths, lease, remaining)
        return answer(request, {**leased, **asked_keys(request, body, keys)})

    @router.post(
        "/leases/{lease_id}/renew",
        summary="Let a lease live on",
        response_model=RenewAnswer,
        responses=problem_answers(*BODY_PROBLEMS, "lease-gone"),
        openapi_extra=needs(Role.WRITE) | request_schema(RenewBody),
    )
    async def renew_lease(request: Request, lease_id: str) -> Response:
        body = check(RenewBody, await read_body(request, config.server.max_body_bytes))
        lease_ms = min(body.lease_ms or config.lease.default_ms, config.lease.max_ms)
        lease = service.renew_lease(lease_id, lease_ms, bound_tenant(request))
        return answer(request, {"lease": {"id": lease.id, "expires_in_ms": service.remaining_ms(lease)}})

    @router.delete(
        "/leases/{lease_id}",
        summary="Release a lease",
        status_code=204,
        openapi_extra=needs(Role.WRITE),
    )
    async def release_lease(request: Request, lease_id: str) -> Response:
        service.release_lease(lease_id, bound_tenant(request))
        return Response(status_code=204)

    @router.get(
        "/pool",
        summary="Say where the pool is and how it is laid out",
        response_model=PoolAnswer,
        openapi_extra=needs(Role.READ),
    )
    async def get_pool(request: Request) -> Response:
        pool = context.pool
        facts = {"path": pool.path, "bytes": pool.size, "instance": pool.instance, "generation": pool.generation}
        return answer(request, {**facts, "regions": describe_regions(pool.geometry)})

    @router.get(
        "/models",
        summary="List the configured models",
        response_model=ModelsAnswer,
        openapi_extra=needs(Role.READ),
    )
    async def get_models(request: Request) -> Response:
        layouts = [pool.layout for pool in service.engine.pools.values()]
        schemes = {name: scheme.name for name, scheme in context.hash_schemes.items()}
        models = [
            {**describe_model(layout, context.pool.geometry), "hash": schemes.get(layout.name)} for layout in layouts
        ]
        return answer(request, {"models": models})

    @router.get(
        "/info",
        summary="Say what this service is",
        response_model=InfoAnswer,
        openapi_extra=needs(Role.READ),
    )
    async def get_info(request: Request) -> Response:
        info = {
            "version": context.version,
            "storage": config.storage.kind,
            "storage_state": context.storage_state,
            "pinned": context.pool.pinned,
            "hugepages": context.pool.hugepages,
            "uptime_s": round(time.monotonic() - context.started, 3),
            "instance": context.pool.instance,
            "generation": context.pool.generation,
            "models": list(service.engine.pools),
            "regions_uds": config.server.regions_uds,
        }
        return answer(request, info)

    return router
