"""A fake Forestage in memory, for the tests of programs that use this client.

It answers both clients without a network and follows the service's arithmetic: hit lengths, boundaries, truncation,
shortfall, leases, pins, writes, eviction, refusals; tenants may be named, but have no shares. It holds no page bytes,
has no pool file, and reads and writes L3 in no time: a job is done when its prefetch returns, unless `hold` was called,
and a page is durable when it is committed. Jobs never share reads, so `joined` is always 0.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from threading import Condition
from typing import Any

import httpx2

from forestage_client._codec import (
    JSON_TYPE,
    MSGPACK_TYPE,
    Encoding,
    Key,
    decode_body,
    decode_keys,
    encode_body,
    encode_fields,
    encode_slots,
)
from forestage_client._errors import BadRequest, ForestageError, Stopping, Unauthorized
from forestage_client._fake_service import FakeService, Reply
from forestage_client._types import Component, Model
from forestage_client.aclient import AsyncClient
from forestage_client.client import Client

__all__ = ["DEMO_MODEL", "FakeForestage"]

DEMO_MODEL = Model("demo", page_tokens=64, components=(Component("kv", bytes=65536),))

_OPEN_PATHS = ("/healthz", "/readyz", "/metrics")


class FakeForestage:
    """An in-memory service. Threads and tasks may share it.

    Args:
        models: what is configured; `Component.slots` gives a component its own number of pool slots, `Model.hash` lets
            prompts come as token ids.
        pool_pages: slots of every component that names none.
        queue_limit: jobs held at once (see `hold`) before the next prefetch is refused with QueueFull.
        token: what clients must send; those of `client` and `aclient` do.
        default_lease_ms: how long leases last that name no time.
    """

    def __init__(
        self,
        models: Iterable[Model] = (DEMO_MODEL,),
        pool_pages: int = 1024,
        *,
        queue_limit: int = 1024,
        token: str | None = None,
        default_lease_ms: int = 30_000,
    ) -> None:
        self._service = FakeService(models, pool_pages, queue_limit, default_lease_ms)
        self._token = token
        self._changed = Condition()
        self._streams = 0  # how often they were broken

    # ---- for the test

    def client(self, *, encoding: Encoding = "msgpack", token: str | None = None) -> Client:
        """Return a Client of this service; it sends `token`, or the right one if None."""
        return _FakeClient(self, token or self._token, encoding)

    def aclient(self, *, encoding: Encoding = "msgpack", token: str | None = None) -> AsyncClient:
        """Return an AsyncClient of this service; it sends `token`, or the right one if None."""
        return _FakeAsyncClient(self, token or self._token, encoding)

    def store(self, model: str, keys: Sequence[Key], tail_states: Mapping[str, Sequence[int]] | None = None) -> None:
        """Put a prefix into L3. `tail_states` names, per tail component, the prefix lengths (pages) with a state."""
        with self._changed:
            self._service.pools[model].store(decode_keys({"keys": list(keys)}), tail_states or {})

    def forget(self, model: str, keys: Sequence[Key], component: str | None = None) -> None:
        """Take pages out of L3, of one component or of all; resident pages stay in the pool."""
        with self._changed:
            self._service.pools[model].forget(decode_keys({"keys": list(keys)}), component)

    def hold(self) -> None:
        """Let jobs that start from now on stay "loading", with their slots reserved, until `resume`."""
        with self._changed:
            self._service.holding = True

    def resume(self) -> None:
        """Let held and coming jobs be done."""
        with self._changed:
            self._service.resume()
            self._changed.notify_all()

    def stop(self) -> None:
        """Refuse everything with Stopping, as a service that shuts down."""
        with self._changed:
            self._service.stopping = True
            self._changed.notify_all()

    @property
    def now_s(self) -> float:
        """The clock by which leases and writes expire, in seconds. It stands still until set."""
        return self._service.now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        with self._changed:
            self._service.now_s = now_s
            self._service.expire()
            self._changed.notify_all()

    @property
    def num_leases(self) -> int:
        """How many leases have neither expired nor been released: 0 after a program that cleans up."""
        return len(self._service.leases)

    @property
    def num_writes(self) -> int:
        """How many writes have slots and were neither committed nor dropped: 0 after a program that cleans up."""
        return self._service.writes.num_open

    @property
    def num_pins(self) -> int:
        """How many pins have neither expired nor been ended."""
        return len(self._service.pins)

    # ---- for transports

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        """Answer one request; blocks while it waits for a held job (in real time)."""
        if request.url.path == "/v1/events":
            return self._stream(request)
        with self._changed:
            reply = self._accept(request)
            if (job := reply.job) is not None:
                self._changed.wait_for(lambda: job.done, reply.wait_ms / 1000)
            return self._written(reply, request)

    async def answer_async(self, request: httpx2.Request) -> httpx2.Response:
        """Answer one request; other tasks run while it waits for a held job (in real time)."""
        if request.url.path == "/v1/events":
            return self._stream(request)
        with self._changed:
            reply = self._accept(request)
        ends = time.monotonic() + reply.wait_ms / 1000
        while reply.job is not None and not reply.job.done and time.monotonic() < ends:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        with self._changed:
            return self._written(reply, request)

    def break_streams(self) -> None:
        """End what follows the events, as a service that is started anew does; followers come back by themselves."""
        with self._changed:
            self._streams += 1
            self._changed.notify_all()

    def _stream(self, request: httpx2.Request) -> httpx2.Response:
        model = request.url.params.get("model")
        with self._changed:
            try:
                self._authorize(request)
                self._service.events.require(model)
                if self._service.stopping:
                    raise Stopping("the fake was told to stop")
            except ForestageError as error:
                return self._written(_refusal(error), request)
            self._service.events.look()
            number, first = self._service.events.begin(request.headers.get("last-event-id"), model)
        stream = _Stream(self._service, self._changed, model, number, first, lambda: self._streams)
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=stream)

    def _authorize(self, request: httpx2.Request) -> None:
        authorization = request.headers.get("authorization")
        if self._token and request.url.path not in _OPEN_PATHS and authorization != f"Bearer {self._token}":
            raise Unauthorized("a bearer token is needed")

    def _accept(self, request: httpx2.Request) -> Reply:
        try:
            self._authorize(request)
            path = request.url.path.strip("/").split("/")
            reply = self._service.handle(request.method, path, dict(request.url.params), _read_body(request))
            self._changed.notify_all()
        except ForestageError as error:
            return _refusal(error)
        return reply

    def _written(self, reply: Reply, request: httpx2.Request) -> httpx2.Response:
        status, value = reply.status, reply.value
        if reply.job is not None:
            status, value = 200 if reply.job.done else reply.status, self._service.describe(reply.job)
        if not isinstance(value, dict):
            return httpx2.Response(status, content=str(value or ""), headers={"content-type": "text/plain"})
        if status >= 400:
            headers = {"content-type": "application/problem+json"}
            if (retry_after_s := value.pop("retry_after_s")) is not None:
                headers["retry-after"] = str(retry_after_s)
            return httpx2.Response(status, content=encode_body(value, None, "json"), headers=headers)
        packed = MSGPACK_TYPE in request.headers.get("accept", "")
        encoding: Encoding = "msgpack" if packed else "json"
        if "slots" in value:
            value["slots"] = {
                name: slots if None in slots else encode_slots(slots, encoding)
                for name, slots in value["slots"].items()
            }
        if "actions" in value:
            value["actions"] = [_with_keys(action, encoding) for action in value["actions"]]
        headers = {"content-type": MSGPACK_TYPE if packed else JSON_TYPE}
        return httpx2.Response(status, content=encode_body(value, reply.keys, encoding), headers=headers)


def _with_keys(action: dict[str, Any], encoding: Encoding) -> Mapping[str, object]:
    others = {name: value for name, value in action.items() if name != "keys"}
    return encode_fields(others, action.get("keys"), encoding)


def _refusal(error: ForestageError) -> Reply:
    problem = {"type": error.slug, "title": type(error).__name__, "status": error.status}
    return Reply(error.status or 500, {**problem, "detail": error.detail, "retry_after_s": error.retry_after_s})


class _Stream(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """The events for one follower; ends when the fake stops or its streams are broken."""

    def __init__(
        self,
        service: FakeService,
        changed: Condition,
        model: str | None,
        number: int,
        first: str,
        breaks: Callable[[], int],
    ) -> None:
        self._service = service
        self._changed = changed
        self._model = model
        self._number = number
        self._first = first
        self._breaks = breaks
        self._begun = breaks()

    def _ends(self) -> bool:
        return self._service.stopping or self._breaks() != self._begun

    def _news(self) -> list[bytes]:
        events = self._service.events
        texts = [self._first, *events.after(self._number, self._model)]
        self._first, self._number = "", events.number
        return [text.encode() for text in texts if text]

    def __iter__(self) -> Iterator[bytes]:
        while True:
            with self._changed:
                news = self._news()
                if not news and self._ends():
                    return
                if not news:
                    self._changed.wait()
            yield from news

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            with self._changed:
                news = self._news()
                ends = self._ends()
            for text in news:
                yield text
            if not news and ends:
                return
            if not news:
                await asyncio.sleep(0.001)


def _read_body(request: httpx2.Request) -> dict[str, object]:
    if not request.content:
        return {}
    media_type = request.headers.get("content-type", "")
    if media_type not in (JSON_TYPE, MSGPACK_TYPE):
        raise BadRequest(f"media type {media_type}", status=415, slug="unsupported-media-type")
    try:
        body = decode_body(request.content, media_type)
    except ValueError as error:
        raise BadRequest(str(error), status=400, slug="unparsable") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be an object")
    return body


class _FakeClient(Client):
    def __init__(self, fake: FakeForestage, token: str | None, encoding: Encoding) -> None:
        self._fake = fake
        super().__init__("http://forestage.invalid", token=token, encoding=encoding)

    def _connect(self) -> httpx2.BaseTransport:
        return httpx2.MockTransport(self._fake.answer)


class _FakeAsyncClient(AsyncClient):
    def __init__(self, fake: FakeForestage, token: str | None, encoding: Encoding) -> None:
        self._fake = fake
        super().__init__("http://forestage.invalid", token=token, encoding=encoding)

    def _connect(self) -> httpx2.AsyncBaseTransport:
        return httpx2.MockTransport(self._fake.answer_async)
