"""Memory that other processes pass over a unix socket, to have pages written to it.

A client sends four bytes of length (little-endian), a JSON object, and its descriptors with them (SCM_RIGHTS); it is
answered in the same form, with the id of the region or with why not. docs/api.md has the form.

Law: a region lives exactly as long as its connection. There are at most `MAX_REGIONS` connections, each with at most
`MAX_FILES` descriptors; nothing is mapped and no memory is taken, so their size needs no bound.
"""

import array
import asyncio
import contextlib
import json
import logging
import os
import socket
import uuid
from collections.abc import Callable

from forestage.core.errors import BadRequestError, CapacityError, ForestageError, GoneError
from forestage.pool.foreign import ForeignMemory

__all__ = ["MAX_FILES", "MAX_REGIONS", "Regions"]

log = logging.getLogger("forestage.prefetch")

MAX_REGIONS = 64
MAX_FILES = 16
_MAX_HEADER_BYTES = 4096
_HANDSHAKE_S = 10.0
_PAUSE_S = 0.1  # when there are no descriptors left to accept with


class Regions:
    """The regions of one service. `on_gone` is called on the loop after one has ended."""

    def __init__(self, on_gone: Callable[[], None]) -> None:
        self._on_gone = on_gone
        self._by_id: dict[str, ForeignMemory] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._connections = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, region_id: str) -> ForeignMemory:
        """Return a region whose connection is open; raises GoneError."""
        memory = self._by_id.get(region_id)
        if memory is None:
            raise GoneError("this region was never registered, or its connection has ended", slug="region-gone")
        return memory

    def listen_on(self, listener: socket.socket) -> None:
        """Name the socket, bound and not listening, at which `serve` shall take regions."""
        self._listener = listener

    def serve(self, tasks: asyncio.TaskGroup) -> None:
        """Take regions from whoever connects, until `close`; without a socket to listen on do nothing."""
        if self._listener is not None:
            self._listener.listen()
            self._listener.setblocking(False)
            self._start(tasks, self._accept(self._listener, tasks))

    def close(self) -> None:
        """End all connections, and so all regions. Idempotent."""
        self._closed = True
        for task in tuple(self._tasks):
            task.cancel()

    def _start(self, tasks: asyncio.TaskGroup, work: "asyncio._CoroutineLike[None]") -> None:
        task = tasks.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket, tasks: asyncio.TaskGroup) -> None:
        while not self._closed:
            await _readable(listener)
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                log.warning("cannot take the connection of a region: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            connection.setblocking(False)
            self._start(tasks, self._hold(connection))

    async def _hold(self, connection: socket.socket) -> None:
        """Keep what a connection brings until it ends."""
        region_id = uuid.uuid4().hex
        self._connections += 1
        try:
            with connection, contextlib.suppress(OSError):  # TimeoutError is one, too
                try:
                    if self._connections > MAX_REGIONS:
                        raise CapacityError(f"there are {MAX_REGIONS} regions already", slug="too-many-regions")
                    async with asyncio.timeout(_HANDSHAKE_S):
                        memory = await _receive(connection)
                except ForestageError as error:
                    _answer(connection, {"error": error.slug, "detail": error.detail})
                    return
                self._by_id[region_id] = memory
                try:
                    _answer(connection, {"region": region_id, "bytes": memory.size})
                    await _readable(connection)  # more bytes than the first message are an end as well
                finally:
                    del self._by_id[region_id]
                    memory.close()
                    self._on_gone()
        finally:
            self._connections -= 1


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


async def _receive(connection: socket.socket) -> ForeignMemory:
    """Read a first message. Raises BadRequestError; then, and when it is cancelled, no descriptor is left open."""
    data, fds = bytearray(), array.array("i")
    try:
        while len(data) < 4 or len(data) < 4 + _header_bytes(data):
            await _readable(connection)
            room = socket.CMSG_SPACE(MAX_FILES * fds.itemsize)
            try:
                chunk, extra, flags, _ = connection.recvmsg(4 + _MAX_HEADER_BYTES, room, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                continue
            for level, kind, packed in extra:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds.frombytes(packed[: len(packed) // fds.itemsize * fds.itemsize])
            if flags & socket.MSG_CTRUNC or len(fds) > MAX_FILES:
                raise BadRequestError(f"a region may have {MAX_FILES} descriptors")
            if not chunk:
                raise BadRequestError("the connection ended before its message was whole")
            data += chunk
        _check_header(bytes(data[4:]), len(fds))
        taken, fds = fds.tolist(), array.array("i")
    finally:
        for fd in fds:
            os.close(fd)
    return ForeignMemory(taken)


def _header_bytes(data: bytearray) -> int:
    size = int.from_bytes(data[:4], "little")
    if size > _MAX_HEADER_BYTES:
        raise BadRequestError(f"a header may have {_MAX_HEADER_BYTES} bytes")
    return size


def _check_header(data: bytes, num_fds: int) -> None:
    try:
        header = json.loads(data)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("version") != 1:
        raise BadRequestError('the header must be a JSON object with "version": 1')
    if header.get("files") != num_fds or not num_fds:
        raise BadRequestError(f"{num_fds} descriptors came, which are not the header's files, or none")


def _answer(connection: socket.socket, answer: dict[str, object]) -> None:
    data = json.dumps(answer).encode()
    connection.sendall(len(data).to_bytes(4, "little") + data)
