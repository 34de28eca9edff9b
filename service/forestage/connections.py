"""One HTTP connection: uvicorn's, that also tells a client which only ended its sending side from one that has left.

Both look the same at first, an end of input. So the client is sent an interim answer, which any HTTP/1.1 client passes
over: who has left resets the connection, who still listens gets the final answer, and then the connection is closed.
Law: after its end of input a connection is either closed at once or serves what it was asked completely; and no request
makes the service keep more than a bounded head of it, whoever sends it. A request that is not whole in time, or an
answer that is not taken, ends its connection.
"""

import asyncio
import json
import socket
from http import HTTPStatus

from starlette.types import Receive, Scope, Send
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from forestage.api.auth import OPEN_ROUTES
from forestage.api.events import ENDLESS_ROUTES
from forestage.api.problems import problem
from forestage.crowd import Crowd

__all__ = ["Connection"]

_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_TCP_CLOSE = 7  # tcp_info.tcpi_state of a connection that was reset; 8, CLOSE_WAIT, of one that may still be answered
_FIRST_LOOK_S = 0.005
_LOOK_EVERY_S = 0.1
_MAX_HEAD_BYTES = 64 << 10  # of the request line's path and the headers
# Bytes that came while a head was not whole: the last piece may hold a body already, and reads bring 256 KiB at most.
_MAX_UNPARSED_BYTES = 512 << 10


class Connection(HttpToolsProtocol):
    """Serves requests one after another; see the module for what an end of input does."""

    _look: asyncio.TimerHandle | None = None
    _served: RequestResponseCycle | None = None
    _in_head = False
    _head_bytes = 0
    _unparsed_bytes = 0
    _due: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None
    crowd = Crowd()
    request_timeout_s = 30.0

    @classmethod
    def within(cls, crowd: Crowd, request_timeout_s: float) -> "type[Connection]":
        """Return a kind of connection of its own, whose requests must be whole in so many seconds."""
        return type(cls.__name__, (cls,), {"crowd": crowd, "request_timeout_s": request_timeout_s})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_whole()
        self.crowd.enter(self, self.loop.time())

    def dismiss(self) -> None:
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # refused already
        super().data_received(data)
        if self._in_head:
            self._unparsed_bytes += len(data)
            if self._unparsed_bytes > _MAX_UNPARSED_BYTES and not self.transport.is_closing():
                self._head_bytes = self._unparsed_bytes
                self.send_400_response("")

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes, self._unparsed_bytes = True, 0, 0
        self._expect_whole()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._expect_nothing()
        if not self.cycle.response_complete:
            self.crowd.serve(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.crowd.wait(self, self.loop.time())
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_taken()

    def resume_writing(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
        super().resume_writing()

    def _expect_whole(self) -> None:
        self._expect_nothing()
        self._due = self.loop.call_later(self.request_timeout_s, self._come_too_late)

    def _expect_nothing(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _come_too_late(self) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        if self.transport.is_closing():
            self.transport.abort()
        elif self.flow.read_paused:
            self._expect_whole()  # it is us who do not read on
        elif not self._in_head and (cycle is None or cycle.response_started):
            self.transport.abort()  # nothing came at all, or it was answered already and its body goes on and on
        else:
            self._refuse(408, "request-timeout", f"requests must be whole within {self.request_timeout_s:g} s")

    def _expect_taken(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stuck = self.loop.call_later(self.request_timeout_s, self._see_whether_it_takes, left)

    def _see_whether_it_takes(self, left: int) -> None:
        if self.transport.get_write_buffer_size() < left:
            self._expect_taken()
        else:
            self.transport.abort()

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > _MAX_HEAD_BYTES:
            raise ValueError("head too large")  # the parser stops, and has send_400_response called

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open (True) while a request that came whole has no answer yet."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        if self.scope.get("http_version") != "1.1":
            return False  # knows no interim answers
        if self.scope["path"] in ENDLESS_ROUTES:
            return False  # there is no final answer to wait for
        cycle.keep_alive = False
        if self._look is None:
            if self._served is None or not self._served.response_started:
                self.transport.write(_INTERIM)
            self._look_again(_FIRST_LOOK_S)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.crowd.leave(self)
        for timer in (self._due, self._stuck):
            if timer is not None:
                timer.cancel()
        if self._look is not None:
            self._look.cancel()
        served = self._served
        if served is not None and not served.response_complete:
            # Of pipelined requests uvicorn tells the newest, which may wait behind this one.
            served.disconnected = True
            served.message_event.set()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or too much of it, as every other error is answered."""
        if self._head_bytes > _MAX_HEAD_BYTES:
            self._refuse(431, "too-large", f"path and headers may have {_MAX_HEAD_BYTES} bytes")
        else:
            self._refuse(400, "unparsable", msg)

    def _refuse(self, status: int, slug: str, msg: str) -> None:
        title = HTTPStatus(status).phrase
        body = json.dumps({"type": slug, "title": title, "status": status, "detail": msg}).encode()
        head = f"content-type: application/problem+json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(f"HTTP/1.1 {status} {title}\r\n{head}".encode() + body)
        self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._served = cycle
        if not cycle.more_body:
            self.crowd.serve(self)
        if cycle.scope["path"] not in OPEN_ROUTES and not self.crowd.has_room(self.loop.time()):
            app = _refuse_in_crowd  # type: ignore[assignment]
        super()._start_asgi_task(cycle, app)

    def _look_again(self, after_s: float) -> None:
        self._look = self.loop.call_later(after_s, self._see_whether_it_left, after_s)

    def _see_whether_it_left(self, waited_s: float) -> None:
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if _was_reset(self.transport):
            self.transport.abort()
        else:
            self._look_again(min(2 * waited_s, _LOOK_EVERY_S))


async def _refuse_in_crowd(scope: Scope, receive: Receive, send: Send) -> None:
    detail = "as many connections as there may be are busy; probes are still answered"
    headers = {"Connection": "close", "Retry-After": "1"}
    await problem(503, "too-many-connections", detail, headers=headers)(scope, receive, send)


def _was_reset(transport: asyncio.Transport) -> bool:
    """Say whether a TCP connection was reset. A unix socket tells by failing to take the interim answer."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    state: bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return state[0] == _TCP_CLOSE
