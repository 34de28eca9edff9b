"""A TCP proxy before a real server that does to connections what networks and dying machines do.

Law: bytes leave in the order in which they came, none is made up and none is left out but by ending the connection.
Its threads do not depend on anybody's event loop; every switch works at once on open connections, too.
"""

import contextlib
import ctypes
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

from support.redis_process import free_port

__all__ = ["FaultProxy"]

_libc = ctypes.CDLL(None, use_errno=True)

_CHUNK_BYTES = 128 << 10
_TICK_S = 0.01  # a throttled connection gets its share so often


@dataclass(slots=True)
class _Way:
    """One direction of all connections. `budget` counts the bytes that may still pass, None for any number."""

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    is_held: bool = False
    budget: int | None = None
    passed: int = 0


@dataclass(slots=True, eq=False)
class _Connection:
    """A client's socket, and the one to the server once there is one."""

    client: socket.socket
    server: socket.socket | None = None
    is_ended: bool = False
    threads: list[threading.Thread] = field(default_factory=list)


class FaultProxy:
    """Passes everything on until told otherwise; `heal` makes all well again.

    `accepted` counts the connections there ever were, `open` those that are, `requests` and `replies` the bytes that
    went each way.
    """

    def __init__(self, target_port: int) -> None:
        """Take a free port of loopback; nothing listens before the `with` block."""
        self._target = ("127.0.0.1", target_port)
        self._changed = threading.Condition()
        self._requests, self._replies = _Way(), _Way()
        self._connections: set[_Connection] = set()
        self._is_hole = False
        self._cut_resets: bool | None = None
        self._listener: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self.port = free_port()
        self.accepted = 0

    @property
    def url(self) -> str:
        """The Redis URL of database 0 behind this proxy."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def open(self) -> int:
        with self._changed:
            return len(self._connections)

    @property
    def requests(self) -> int:
        return self._requests.passed

    @property
    def replies(self) -> int:
        return self._replies.passed

    # ---- faults

    def delay(self, seconds: float, *, requests: bool = False) -> None:
        """Let every piece of a reply (or of a request) wait so long before it goes on."""
        with self._switch():
            (self._requests if requests else self._replies).delay_s = seconds

    def throttle(self, bytes_per_s: float) -> None:
        """Let replies through no faster than this, each connection by itself."""
        with self._switch():
            self._replies.bytes_per_s = bytes_per_s

    def hold(self, after: int = 0) -> None:
        """Let so many more bytes of replies through, all connections together, and then nothing, without an end."""
        with self._switch():
            self._replies.budget = after

    def cut(self, after: int = 0, *, reset: bool = False) -> None:
        """Let so many more bytes of replies through, all together, then end every connection that has more to say."""
        with self._switch():
            self._replies.budget = after
            self._cut_resets = reset

    def black_hole(self) -> None:
        """Accept connections and answer nothing, on those that are open neither."""
        with self._switch():
            self._is_hole = self._requests.is_held = self._replies.is_held = True

    def refuse(self) -> None:
        """Refuse new connections and end the open ones."""
        self._stop_listening()
        self.drop()

    def drop(self, *, reset: bool = False) -> None:
        """End all open connections, by a reset if wanted."""
        with self._changed:
            connections = list(self._connections)
        for connection in connections:
            self._end(connection, reset=reset)

    def heal(self) -> None:
        """Undo everything; what was held goes on if its connection is still there."""
        with self._switch():
            for way in (self._requests, self._replies):
                way.delay_s = way.bytes_per_s = 0.0
                way.is_held, way.budget = False, None
            self._is_hole, self._cut_resets = False, None
        if self._listener is None:
            self._listen()

    @contextlib.contextmanager
    def _switch(self) -> Iterator[None]:
        with self._changed:
            yield
            self._changed.notify_all()

    # ---- life

    def __enter__(self) -> Self:
        self._listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.refuse()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=128)
        self._start(self._accept, self._listener)

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
            listener.close()

    def _start(self, target: object, *arguments: object) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(client)
            with self._changed:
                self.accepted += 1
                self._connections.add(connection)
            self._start(self._serve, connection)

    def _serve(self, connection: _Connection) -> None:
        with self._changed:
            self._changed.wait_for(lambda: connection.is_ended or not self._is_hole)
        try:
            server = socket.create_connection(self._target, timeout=10)
        except OSError:
            self._end(connection, reset=True)
            return
        server.settimeout(None)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed:
            if connection.is_ended:
                server.close()
                return
            connection.server = server
        self._start(self._pump, connection, server, connection.client, self._replies)
        self._pump(connection, connection.client, server, self._requests)

    def _pump(self, connection: _Connection, source: socket.socket, sink: socket.socket, way: _Way) -> None:
        buffer = bytearray(_CHUNK_BYTES)
        try:
            while got := source.recv_into(buffer):
                left = memoryview(buffer)[:got]
                while left:
                    allowed = self._wait_for_room(connection, way, len(left))
                    sink.sendall(left[:allowed])
                    left = left[allowed:]
        except OSError:
            pass
        self._end(connection)

    def _wait_for_room(self, connection: _Connection, way: _Way, wanted: int) -> int:
        """Return how many of `wanted` bytes may pass now, at least one. Raises OSError when the connection ended."""
        with self._changed:
            if way.delay_s:
                deadline = time.monotonic() + way.delay_s
                while way.delay_s and not connection.is_ended and (left := deadline - time.monotonic()) > 0:
                    self._changed.wait(left)
            if way.bytes_per_s:
                self._changed.wait(_TICK_S)
                wanted = min(wanted, max(1, int(way.bytes_per_s * _TICK_S)))
            while way.is_held or way.budget == 0:
                if way.budget == 0 and self._cut_resets is not None:
                    self._end(connection, reset=self._cut_resets)
                if connection.is_ended:
                    break
                self._changed.wait()
            if connection.is_ended:
                raise OSError("ended")
            if way.budget is not None:
                wanted = min(wanted, way.budget)
                way.budget -= wanted
            way.passed += wanted
            return wanted

    def _end(self, connection: _Connection, *, reset: bool = False) -> None:
        with self._changed:
            if connection.is_ended:
                return
            connection.is_ended = True
            self._connections.discard(connection)
            self._changed.notify_all()
        if reset:
            # Connecting to nowhere is the one way to send a reset while another thread waits in this socket.
            _libc.connect(connection.client.fileno(), bytes(16), 16)
        for end in (connection.client, connection.server):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)  # wakes the thread in recv
                end.close()
