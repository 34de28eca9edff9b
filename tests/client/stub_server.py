"""An HTTP server on a real socket, in a thread, whose answers a test decides."""

import socket
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2

__all__ = ["Answering", "StubServer"]

Answering = Callable[[httpx2.Request], httpx2.Response | None]
"""How to answer a request; None closes the connection without an answer."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one segment, or the peer's delayed acknowledgement costs 40 ms
    server: "_Server"

    def setup(self) -> None:
        super().setup()
        self.server.owner.sockets.append(self.connection)

    def serve(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length", "0")))
        request = httpx2.Request(self.command, f"http://stub{self.path}", headers=self.headers.items(), content=content)
        owner = self.server.owner
        owner.requests.append(request)
        response = owner.answer(request)
        if response is None:
            self.close_connection = True
            return
        self.send_response_only(response.status_code)
        for name, value in response.headers.items():
            if name != "content-length":
                self.send_header(name, value)
        self.send_header("content-length", str(len(response.content)))
        self.end_headers()
        self.wfile.write(response.content)
        self.close_connection |= owner.close_when_idle

    do_GET = do_POST = do_DELETE = serve  # noqa: N815 - names that http.server looks for

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the overridden name
        """Keep the tests' output clean."""


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, owner: "StubServer", address: Any) -> None:
        self.owner = owner
        self.address_family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        super().__init__(address, _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, _ = super().get_request()
        return connection, ("stub", 0)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that leave are part of the tests."""


class StubServer:
    """Serve until the end of the `with` block. `requests` and `sockets` list what came in, in order.

    With `close_when_idle` it closes each connection after an answer, without announcing it.
    """

    def __init__(self, answer: Answering, unix_socket: Path | None = None, *, close_when_idle: bool = False) -> None:
        self.answer = answer
        self.close_when_idle = close_when_idle
        self.requests: list[httpx2.Request] = []
        self.sockets: list[socket.socket] = []
        self._server = _Server(self, ("127.0.0.1", 0) if unix_socket is None else str(unix_socket))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.url = (
            f"http://127.0.0.1:{self._server.server_address[1]}" if unix_socket is None else f"unix:{unix_socket}"
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
