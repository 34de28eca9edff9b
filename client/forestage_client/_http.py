"""The one seam to the network: httpx2 transports over TCP or a unix socket, without and with asyncio.

Transports are used without httpx2's clients: no proxies from the environment, no cookies, redirects or log lines,
and a quarter less time a call. httpx2 is imported when the first client is made, not before.

Law: no exception of httpx2 leaves here, and none of its types is part of the public interface.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from forestage_client._calls import Answer, Call
from forestage_client._codec import MEDIA_TYPES, Encoding
from forestage_client._errors import BadRequest, DeadlineExceeded, Unreachable
from forestage_client._pool_events import Returning
from forestage_client._types import PoolEvent

if TYPE_CHECKING:
    import httpx2

__all__ = ["AsyncLink", "Link", "Wire", "open_async_transport", "open_transport"]

T = TypeVar("T")

KEPT_CONNECTIONS = 32  # more may be open at once; these many stay open while idle
KEPT_S = 60.0
SILENT_STREAM_S = 45.0  # something comes every 15 s, be it only a comment
_EVENTS: Call[None] = Call("GET", "/v1/events", lambda _: None)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the service listens: `base` for the request line, and the unix socket if it is one."""

    url: str
    base: str
    unix_socket: str | None


def _place(url: str) -> _Place:
    import httpx2

    if "@" in url.partition("//")[2]:
        raise ValueError("url must not carry credentials; give token")  # and they must not be shown here
    try:
        parts = urlsplit(url)
        bare = not (parts.query or parts.fragment) and (parts.port is None or parts.port > 0)
        if bare and parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/"):
            return _Place(url, "http://localhost", parts.path)
        if bare and parts.scheme == "http" and parts.hostname and parts.path in ("", "/"):
            return _Place(url, str(httpx2.URL(f"http://{parts.netloc}")), None)
    except (ValueError, httpx2.InvalidURL):  # a port that is no number, a host that is no name
        pass
    raise ValueError(f"url must be http://host:port or unix:/path/to.sock, not {url!r}")


class Wire:
    """How calls become httpx2 requests and failures become ForestageErrors; shared by both links.

    `timeout_s` is what a call may take beyond the time the service was asked to wait.
    """

    __slots__ = ("_authorization", "_encoding", "_place", "_timeout_s")

    def __init__(self, url: str, token: str | None, timeout_s: float, encoding: Encoding) -> None:
        if encoding not in MEDIA_TYPES:
            raise ValueError(f"encoding must be msgpack or json, not {encoding!r}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, not {timeout_s}")
        self._place = _place(url)
        self._timeout_s = timeout_s
        self._encoding = encoding
        # Read from files, tokens tend to end in a newline. A bad one must be refused here, without showing it:
        # the HTTP layer would put the whole header into its exception.
        token = None if token is None else token.strip()
        if token is not None and not (token and token.isascii() and token.isprintable() and " " not in token):
            raise ValueError("token must be printable ASCII without blanks")
        self._authorization = {} if token is None else {"authorization": f"Bearer {token}"}

    @property
    def url(self) -> str:
        return self._place.url

    @property
    def unix_socket(self) -> str | None:
        return self._place.unix_socket

    def budget_s(self, call: Call[object]) -> float:
        return self._timeout_s + call.wait_ms / 1000

    def request(self, call: Call[object], seconds: float) -> httpx2.Request:
        import httpx2

        timeouts = {"connect": min(seconds, self._timeout_s), "read": seconds, "write": seconds, "pool": seconds}
        return httpx2.Request(
            call.method,
            self._place.base + call.path,
            headers=call.headers(self._encoding) | self._authorization,
            content=call.content(self._encoding),
            extensions={"timeout": timeouts},
        )

    def stream_request(self, returning: Returning) -> httpx2.Request:
        """Return the request for events, which come for as long as the stream lasts."""
        import httpx2

        seconds = self._timeout_s
        timeouts = {"connect": seconds, "read": max(seconds, SILENT_STREAM_S), "write": seconds, "pool": seconds}
        return httpx2.Request(
            "GET",
            self._place.base + returning.path,
            headers=returning.headers | self._authorization,
            extensions={"timeout": timeouts},
        )

    @contextmanager
    def translated(self, call: Call[object]) -> Iterator[None]:
        """Turn httpx2's exceptions into ours, the cause kept."""
        import httpx2

        try:
            yield
        except httpx2.InvalidURL as error:
            raise BadRequest(f"{call.method} {call.path[:100]}: {error}", status=414) from error
        except httpx2.TimeoutException as error:
            raise DeadlineExceeded(f"no answer from {self.url} within {self.budget_s(call):g} s") from error
        except httpx2.ConnectError as error:
            _close_refused(error.__cause__)
            raise Unreachable(f"cannot connect to {self.url}: {error}") from error
        except (httpx2.HTTPError, OSError) as error:
            detail = str(error) or type(error).__name__
            raise Unreachable(f"the connection to {self.url} broke: {detail}", maybe_sent=True) from error


def _close_refused(error: BaseException | None) -> None:
    """Close the unix socket of a refused connection.

    httpcore's blocking backend leaves it to the garbage collector: a ResourceWarning at best, and an open descriptor
    for as long as anyone keeps the exception.
    """
    import socket

    trace = error and error.__traceback__
    while trace:
        left = trace.tb_frame.f_locals.get("sock")
        if isinstance(left, socket.socket):
            left.close()
        trace = trace.tb_next


def open_transport(unix_socket: str | None) -> httpx2.HTTPTransport:
    """Make a pool of connections; connects when first used. Thread-safe."""
    import ssl

    import httpx2

    # No TLS is spoken: a context without certificates spares loading the system's.
    return httpx2.HTTPTransport(
        verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), trust_env=False, limits=_limits(), uds=unix_socket
    )


def open_async_transport(unix_socket: str | None) -> httpx2.AsyncHTTPTransport:
    """Make a pool of connections for one event loop; connects when first used."""
    import ssl

    import httpx2

    return httpx2.AsyncHTTPTransport(
        verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), trust_env=False, limits=_limits(), uds=unix_socket
    )


def _limits() -> httpx2.Limits:
    import httpx2

    # A bound on connections would make long polls wait for each other unseen; the callers' number is the bound.
    return httpx2.Limits(max_connections=None, max_keepalive_connections=KEPT_CONNECTIONS, keepalive_expiry=KEPT_S)


class Link:
    """Send calls without asyncio. Thread-safe. A repeatable call whose connection broke is sent once more."""

    def __init__(self, wire: Wire, connect: Callable[[], httpx2.BaseTransport]) -> None:
        self._wire = wire
        self._connect = connect
        self._transport = connect()
        self._closed = False

    def send(self, call: Call[T]) -> T:
        """Send and read the answer; raises ForestageError."""
        if self._closed:
            raise RuntimeError("this client is closed")
        ends = time.monotonic() + self._wire.budget_s(call)
        try:
            answer = self._exchange(self._transport, call, ends)
        except Unreachable as broken:
            if not (call.repeatable and broken.maybe_sent):
                raise
            with self._connect() as fresh:  # other kept connections may be as dead as this one
                answer = self._exchange(fresh, call, ends)
        return call.result(answer)

    def _exchange(self, transport: httpx2.BaseTransport, call: Call[T], ends: float) -> Answer:
        seconds = max(ends - time.monotonic(), 1e-3)
        with self._wire.translated(call):
            request = self._wire.request(call, seconds)
            response = transport.handle_request(request)
            return Answer(response.status_code, response.headers, response.read())

    def follow(self, returning: Returning) -> Iterator[PoolEvent]:
        """Yield the events of one stream until it ends or breaks; raises ForestageError, Unreachable at its end."""
        if self._closed:
            raise RuntimeError("this client is closed")
        with self._wire.translated(_EVENTS):
            response = self._transport.handle_request(self._wire.stream_request(returning))
            try:
                if response.status_code != 200:
                    Answer(response.status_code, response.headers, response.read()).raise_error()
                for line in response.iter_lines():
                    returning.brought()
                    event = returning.lines.take(line)
                    if event is not None:
                        yield event
            finally:
                response.close()
        raise Unreachable(f"{self._wire.url} ended the stream of events", maybe_sent=True)

    def close(self) -> None:
        self._closed = True
        self._transport.close()


class AsyncLink:
    """Send calls from one event loop; else as Link. A cancelled call closes its connection."""

    def __init__(self, wire: Wire, connect: Callable[[], httpx2.AsyncBaseTransport]) -> None:
        self._wire = wire
        self._connect = connect
        self._transport = connect()
        self._closed = False

    async def send(self, call: Call[T]) -> T:
        """Send and read the answer; raises ForestageError."""
        if self._closed:
            raise RuntimeError("this client is closed")
        ends = time.monotonic() + self._wire.budget_s(call)
        try:
            answer = await self._exchange(self._transport, call, ends)
        except Unreachable as broken:
            if not (call.repeatable and broken.maybe_sent):
                raise
            async with self._connect() as fresh:
                answer = await self._exchange(fresh, call, ends)
        return call.result(answer)

    async def _exchange(self, transport: httpx2.AsyncBaseTransport, call: Call[T], ends: float) -> Answer:
        seconds = max(ends - time.monotonic(), 1e-3)
        with self._wire.translated(call):
            request = self._wire.request(call, seconds)
            response = await transport.handle_async_request(request)
            return Answer(response.status_code, response.headers, await response.aread())

    async def follow(self, returning: Returning) -> AsyncGenerator[PoolEvent, None]:
        """Yield the events of one stream until it ends or breaks; raises ForestageError, Unreachable at its end."""
        if self._closed:
            raise RuntimeError("this client is closed")
        with self._wire.translated(_EVENTS):
            response = await self._transport.handle_async_request(self._wire.stream_request(returning))
            try:
                if response.status_code != 200:
                    Answer(response.status_code, response.headers, await response.aread()).raise_error()
                async for line in response.aiter_lines():
                    returning.brought()
                    event = returning.lines.take(line)
                    if event is not None:
                        yield event
            finally:
                await response.aclose()
        raise Unreachable(f"{self._wire.url} ended the stream of events", maybe_sent=True)

    async def aclose(self) -> None:
        self._closed = True
        await self._transport.aclose()
