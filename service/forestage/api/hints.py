"""The route that takes hints: a KvHintsEnvelope whose actions are prefetch, pin or retain, expect, release and demote.

Every action is read before any is carried out, and then all are in one step, in their order. Law: an action is
answered exactly once in each answer, whatever is wrong with it, and one that is wrong stops no other.
"""

import hashlib
import json
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from forestage.api.answers import HintsAnswer
from forestage.api.auth import REFUSALS, RoleRoute, bound_tenant, needs, require, tenant_of
from forestage.api.bodies import (
    MAX_WAIT_MS,
    HintBody,
    HintsBody,
    PinBody,
    PrefetchHint,
    ReleaseHint,
    TenantBody,
    check,
    request_schema,
)
from forestage.api.codec import answer, read_body
from forestage.api.context import Context
from forestage.api.problem_types import problem_answers
from forestage.api.prompts import asked_keys, take_keys
from forestage.api.reading import BODY_PROBLEMS
from forestage.api.waiting import wait_for_jobs
from forestage.core.errors import BadRequestError, ForestageError, StoppingError, TooLargeError
from forestage.core.hint_memory import HintMemory
from forestage.core.hints import HintOutcome, Verdict, judge_demotion, judge_expectation, judge_job, judge_pin
from forestage.core.job import Job, Lengths, PrefetchRequest
from forestage.core.roles import Role

__all__ = ["build_hints"]

WaitMs = Annotated[int, Query(ge=0, le=MAX_WAIT_MS, description="wait so many milliseconds for prefetches to be done")]


@dataclass(frozen=True, slots=True)
class _Done:
    """What became of an action. A prefetch goes on: `job` says how it stands, to whoever asks again too."""

    action: HintBody
    verdict: Verdict
    job: Job | None = None
    further: dict[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> HintOutcome:
        """How it stands now."""
        return self._verdict_now().outcome

    def _verdict_now(self) -> Verdict:
        return self.verdict if self.job is None else judge_job(self.job)

    def describe(self) -> dict[str, Any]:
        verdict, further, job = self._verdict_now(), self.further, self.job
        if job is not None:
            shortfall = {reason.value: pages for reason, pages in job.shortfall.items()}
            standing = {"request_id": job.request.request_id, "state": job.state.value, "shortfall": shortfall}
            further = {**further, **standing, "pages": _pages(job.lengths())}
        names = {"action_id": self.action.action_id, "action_type": self.action.action_type}
        return {**names, "outcome": verdict.outcome.value, "reason": verdict.reason, **further}


_Step = Callable[[], _Done]


def build_hints(context: Context) -> APIRouter:
    """Build `/v1/hints` over a running service."""
    router = APIRouter(prefix="/v1", responses=REFUSALS, route_class=RoleRoute)
    config, service = context.config, context.service
    memory: HintMemory[_Done] = HintMemory(config.prefetch.keep_done_ms / 1e3)

    @router.post(
        "/hints",
        summary="Take an envelope of hints: prefetch, pin or retain, expect, release, demote",
        response_model=HintsAnswer,
        response_model_exclude_none=True,
        responses=problem_answers(*BODY_PROBLEMS, "message-id-conflict", "stopping"),
        openapi_extra=needs(Role.WRITE) | request_schema(HintsBody),
    )
    async def take_hints(request: Request, wait_ms: WaitMs = 0) -> Response:
        arrived = service.now()
        raw = await read_body(request, config.server.max_body_bytes)
        envelope = check(HintsBody, raw)
        ids = [action.action_id for action in envelope.actions]
        if len(set(ids)) != len(ids):
            raise BadRequestError("actions: an action_id occurs twice")
        sender, digest = bound_tenant(request), _digest(raw)
        fresh: tuple[_Done, ...] = ()
        done = memory.find(sender, envelope.message_id, digest, arrived)
        if done is None:
            steps = await _Reader(context, request, envelope.message_id, arrived).read(envelope.actions)
            # It may have come a second time meanwhile.
            done = memory.find(sender, envelope.message_id, digest, service.now())
            if done is None:
                done = fresh = tuple([step() for step in steps])
                memory.remember(sender, envelope.message_id, digest, done, service.now())
        try:
            await wait_for_jobs(service, [each.job for each in done if each.job is not None], wait_ms, request.receive)
        finally:
            for each in fresh:
                service.hints.add(each.action.action_type, each.outcome)
        heading = {"protocol_version": envelope.protocol_version, "message_id": envelope.message_id}
        return answer(request, {**heading, "actions": [each.describe() for each in done]})

    return router


class _Reader:
    """Reads the actions of one envelope into steps, each of which carries one out."""

    def __init__(self, context: Context, request: Request, message_id: str, arrived: float) -> None:
        self._context = context
        self._request = request
        self._message_id = message_id
        self._arrived = arrived
        self._pages = 0

    async def read(self, actions: list[HintBody]) -> list[_Step]:
        return [await self._read(action) for action in actions]

    async def _read(self, action: HintBody) -> _Step:
        kinds = {
            "prefetch": self._prefetch,
            "pin": self._pin,
            "retain": self._pin,
            "expect": self._expect,
            "release": self._release,
            "demote": self._demote,
        }
        pages_before = self._pages
        try:
            if action.action_type not in kinds:
                raise BadRequestError("no action of this type is known", slug="unknown-action")
            if action.action_version.partition(".")[0] != "1":
                raise BadRequestError("only version 1 of this action is known", slug="unknown-version")
            step = await kinds[action.action_type](action, dict(action.payload))
        except StoppingError:
            raise
        except ForestageError as error:
            self._pages = pages_before
            refused = _rejected(action, error)
            return lambda: refused

        def guarded() -> _Done:
            try:
                return step()
            except StoppingError:
                raise
            except ForestageError as error:
                return _rejected(action, error)

        return guarded

    async def _keys(self, payload: dict[str, Any]) -> tuple[bytes, ...]:
        keys = await take_keys(payload, self._context)
        limit = self._context.config.prefetch.max_pages
        if self._pages + len(keys) > limit:
            raise TooLargeError(f"the actions of one envelope may name {limit} pages together")
        self._pages += len(keys)
        return keys

    async def _prefetch(self, action: HintBody, payload: dict[str, Any]) -> _Step:
        config, service = self._context.config, self._context.service
        keys = await self._keys(payload)
        body = check(PrefetchHint, payload, len(keys))
        service.engine.pool(body.model)
        wanted = PrefetchRequest(
            request_id=self._request_id(action),
            model=body.model,
            keys=keys,
            device_pages=body.device_pages,
            min_pages=config.prefetch.min_pages if body.min_pages is None else body.min_pages,
            priority=body.priority,
            deadline_ms=config.prefetch.deadline_ms if body.deadline_ms is None else body.deadline_ms,
            lease_ms=min(body.lease_ms or config.lease.default_ms, config.lease.max_ms),
            tenant=tenant_of(self._request, body),
        )
        shown = asked_keys(self._request, body, keys)

        def begin() -> _Done:
            job, _ = service.submit(wanted, self._arrived)
            return _Done(action, judge_job(job), job, shown)

        return begin

    def _request_id(self, action: HintBody) -> str:
        """Return the same id for an envelope that comes again after it was forgotten here."""
        if not self._message_id:
            return uuid.uuid4().hex
        named = json.dumps([bound_tenant(self._request), self._message_id, action.action_id])
        return f"hint-{hashlib.sha256(named.encode()).hexdigest()[:32]}"

    async def _pin(self, action: HintBody, payload: dict[str, Any]) -> _Step:
        service = self._context.service
        keys = await self._keys(payload)
        body = check(PinBody, payload, len(keys))
        service.engine.pool(body.model)
        ttl_ms = min(body.ttl_ms, self._context.config.lease.max_pin_ms)
        tenant = tenant_of(self._request, body)
        shown = asked_keys(self._request, body, keys)

        def keep() -> _Done:
            lengths, pin = service.pin(body.model, keys, body.device_pages, ttl_ms, tenant)
            kept = {} if pin is None else {"pin_id": pin.id, "expires_in_ms": service.remaining_ms(pin)}
            return _Done(action, judge_pin(lengths), further={**kept, "pages": _pages(lengths), **shown})

        return keep

    async def _expect(self, action: HintBody, payload: dict[str, Any]) -> _Step:
        service = self._context.service
        keys = await self._keys(payload)
        body = check(PinBody, payload, len(keys))
        pool = service.engine.pool(body.model)
        ttl_ms = min(body.ttl_ms, self._context.config.lease.max_pin_ms)
        tenant = tenant_of(self._request, body)
        shown = asked_keys(self._request, body, keys)

        def expect() -> _Done:
            expected = service.expect(body.model, keys, body.device_pages, ttl_ms, tenant)
            if expected is None:
                return _Done(action, Verdict(HintOutcome.ACCEPTED), further={"marked": 0, **shown})
            verdict = judge_expectation(len(keys) - body.device_pages, expected.marked, pool.wants.room)
            named = {"expect_id": expected.id, "expires_in_ms": ttl_ms, "marked": expected.marked}
            return _Done(action, verdict, further={**named, **shown})

        return expect

    async def _release(self, action: HintBody, payload: dict[str, Any]) -> _Step:
        service, tenant = self._context.service, bound_tenant(self._request)
        body = check(ReleaseHint, payload)
        if body.pin_id is None and body.request_id is None and body.expect_id is None:
            raise BadRequestError("pin_id, request_id, expect_id: one of them is needed")

        def release() -> _Done:
            known = True
            if body.pin_id is not None:
                known = service.knows_pin(body.pin_id, tenant)
                service.unpin(body.pin_id, tenant)
            if body.expect_id is not None:
                known = known and service.expects(body.expect_id, tenant)
                service.expect_no_more(body.expect_id, tenant)
            if body.request_id is not None:
                job = service.engine.jobs.get(body.request_id)
                known = known and job is not None and tenant in {None, job.request.tenant}
                service.forget(body.request_id, tenant)
            return _Done(action, Verdict(HintOutcome.ACCEPTED) if known else Verdict(HintOutcome.MISSING, "unknown"))

        return release

    async def _demote(self, action: HintBody, payload: dict[str, Any]) -> _Step:
        require(self._request, Role.ADMIN)  # as POST /v1/evict does, which it is
        engine = self._context.service.engine
        keys = await self._keys(payload)
        body = check(TenantBody, payload, len(keys))
        engine.pool(body.model)
        tenant_of(self._request, body)
        shown = asked_keys(self._request, body, keys)

        def demote() -> _Done:
            demoted, kept = engine.demote(body.model, keys, body.device_pages)
            return _Done(action, judge_demotion(demoted, kept), further={"demoted": demoted, "kept": kept, **shown})

        return demote


def _rejected(action: HintBody, error: ForestageError) -> _Done:
    return _Done(action, Verdict(HintOutcome.REJECTED, error.slug), further={"detail": error.detail})


def _pages(lengths: Lengths) -> dict[str, int]:
    return asdict(lengths)


def _digest(raw: dict[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps(raw, sort_keys=True, default=bytes.hex).encode()).digest()
