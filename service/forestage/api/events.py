"""The route that tells what becomes resident and what leaves the pool, as server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import groupby
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from forestage.api.auth import REFUSALS, RoleRoute, bound_tenant, is_still_taken, needs
from forestage.api.context import Context
from forestage.api.problem_types import problem_answers
from forestage.api.waiting import client_left
from forestage.core.errors import ForbiddenError
from forestage.core.residency import Place
from forestage.core.roles import Role
from forestage.prefetch.feed import Changes, Snapshot

__all__ = ["ENDLESS_ROUTES", "build_events"]

#: Whose answers go on for as long as the client stays.
ENDLESS_ROUTES = frozenset({"/v1/events"})

_KEYS_AT_ONCE = 512
_IDLE_S = 15.0  # proxies commonly end what is silent for a minute
_MEDIA = "text/event-stream"

Model = Annotated[str | None, Query(min_length=1, max_length=256, description="only the pages of this model")]
LastEventId = Annotated[str | None, Header(max_length=256, description="go on behind this event")]


def build_events(context: Context) -> APIRouter:
    """Build `/v1/events` over a running service."""
    router = APIRouter(prefix="/v1", responses=REFUSALS, route_class=RoleRoute)
    service, place = context.service, f"{context.pool.instance}.{context.pool.generation}."

    @router.get(
        "/events",
        summary="Follow what becomes resident and what leaves the pool",
        response_class=Response,
        responses={
            200: {"content": {_MEDIA: {"schema": {"type": "string"}}}},
            **problem_answers("service-token-needed", "unknown-model", "invalid-request", "too-many-listeners"),
        },
        openapi_extra=needs(Role.READ),
    )
    async def get_events(request: Request, model: Model = None, last_event_id: LastEventId = None) -> Response:
        if bound_tenant(request) is not None:
            raise ForbiddenError(
                "pages of all tenants are told: that takes the service-wide token", slug="service-token-needed"
            )
        if model is not None:
            service.engine.pool(model)
        service.residency.require_room()
        messages = _messages(context, place, model, _number(last_event_id, place))
        return _EventStream(_while_taken(request, messages))

    return router


def _number(last_event_id: str | None, place: str) -> int | None:
    """Return where to go on; -1, which is no number of any event, for an id of another start of the service."""
    if not last_event_id:
        return None
    number = last_event_id.removeprefix(place)
    known = number != last_event_id and number.isascii() and number.isdigit() and len(number) < 20
    return int(number) if known else -1


async def _messages(context: Context, place: str, model: str | None, since: int | None) -> AsyncGenerator[bytes, None]:
    facts = {"instance": context.pool.instance, "generation": context.pool.generation}
    async with aclosing(context.service.residency.follow(since, _IDLE_S)) as steps:
        async for step in steps:
            match step:
                case Snapshot(_, lost, pages):
                    if lost:
                        yield _message("gap", {})
                    yield _message("reset", facts)
                    for where, keys in pages:
                        if model in {None, where.model}:
                            for first in range(0, len(keys), _KEYS_AT_ONCE):
                                yield _message("stored", _named(where, keys[first : first + _KEYS_AT_ONCE]))
                    yield _message("ready", {}, f"{place}{step.next}")
                case Changes(_, []):
                    yield b":\n\n"
                case Changes():
                    yield b"".join(_changes(step, place, model))


async def _while_taken(request: Request, messages: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(messages):
        async for message in messages:
            if not is_still_taken(request):
                return
            yield message


def _changes(step: Changes, place: str, model: str | None) -> Iterator[bytes]:
    number = step.next - len(step.events)
    for (stored, where), events in groupby(step.events, key=lambda event: (event.stored, event.place)):
        keys = [event.key for event in events]
        number += len(keys)
        if model in {None, where.model}:
            yield _message("stored" if stored else "removed", _named(where, keys), f"{place}{number}")


def _named(where: Place, keys: Sequence[bytes]) -> Mapping[str, object]:
    return {"model": where.model, "component": where.component, "keys": [key.hex() for key in keys]}


def _message(event: str, data: Mapping[str, object], number: str = "") -> bytes:
    return b"".join(
        (f"id: {number}\n".encode() if number else b"", f"event: {event}\ndata: ".encode(), to_json(data), b"\n\n")
    )


class _EventStream(Response):
    """Sends messages as fast as the client takes them, until it leaves or they end."""

    media_type = _MEDIA

    def __init__(self, messages: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._messages = messages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        left = asyncio.create_task(client_left(receive))
        try:
            await asyncio.wait({sending, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            left.cancel()
            await asyncio.gather(sending, left, return_exceptions=True)
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        begun = False
        async with aclosing(self._messages):
            async for message in self._messages:
                if not begun:
                    await send(head)  # not before: a listener too many is still refused with a status
                    begun = True
                await send({"type": "http.response.body", "body": message, "more_body": True})
        if not begun:
            await send(head)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
