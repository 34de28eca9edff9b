"""Connections that say nothing, little by little, or too much: health answers all along, and nothing of them stays."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from api.raw import exchange
from faults.stored_pages import StoredPages
from support.live import make_keys, until
from support.running import Running, running

TIMEOUT_MS = 1500
MOST = 40
SLOWEST_S = 3.0  # a machine that others use as well
HEAD = b"POST /v1/lookup HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n"
Spoken = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
def pages(tmp_path: Path) -> StoredPages:
    limits = f"port = 0\nmax_connections = {MOST}\nrequest_timeout_ms = {TIMEOUT_MS}"
    return StoredPages.make(tmp_path, server=limits, storage="stall_timeout_ms = 60000")


def _open_files(service: Running) -> int:
    return len(os.listdir(f"/proc/{service.process.pid}/fd"))


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def _slow_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for byte in b"GET /healthz HTTP/1.1\r\nHost: t\r\n" + b"A: b\r\n" * 100:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.05)
    raise AssertionError("it was let go on")


async def _slow_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD)
    for _ in range(5000):
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.05)
    raise AssertionError("it was let go on")


async def _endless_body_of_a_refused_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"POST /nowhere HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(5000):
        writer.write(b"1\r\n \r\n")
        await writer.drain()
        await asyncio.sleep(0.05)
    raise AssertionError("it was let go on")


async def _never_reads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for _ in range(1000):
        writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: t\r\n\r\n" * 10)
        await asyncio.wait_for(writer.drain(), 30)
        await asyncio.sleep(0.05)
    raise AssertionError("it was let go on")


async def _connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    return await asyncio.open_connection(sock=sock, limit=4096)


async def _speak(port: int, speech: Spoken) -> None:
    with contextlib.suppress(ConnectionError):
        reader, writer = await _connect(port)
        try:
            await speech(reader, writer)
        finally:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def _watched(port: int) -> AsyncIterator[list[float]]:
    """Ask for health on a new connection again and again; yields the seconds that each answer took."""
    took: list[float] = []

    async def ask() -> None:
        while True:
            began = time.monotonic()
            status, _, _ = await asyncio.wait_for(exchange(port, "GET /healthz"), 20)
            assert status == 200
            took.append(time.monotonic() - began)
            await asyncio.sleep(0.02)

    asking = asyncio.create_task(ask())
    try:
        yield took
        enough = len(took) + 3
        await until(lambda: len(took) >= enough or asking.done(), 60)
    finally:
        failed = asking.done()
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        assert not failed


@pytest.mark.parametrize(
    ("speech", "connections"),
    [
        (_silent, 3 * MOST),
        (_slow_head, 3 * MOST),
        (_slow_body, 3 * MOST),
        (_endless_body_of_a_refused_request, 3 * MOST),
        (_never_reads, 4),  # each takes megabytes until the kernel has no more room for answers
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_bad_company(pages: StoredPages, speech: Spoken, connections: int) -> None:
    with running(pages.config) as service:
        assert (await exchange(service.port, "GET /healthz"))[0] == 200
        base = _open_files(service)
        async with _watched(service.port) as took:
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                for _ in range(connections):
                    group.create_task(_speak(service.port, speech))
            end = time.monotonic() + 20
            while _open_files(service) > base + 3:
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
        assert max(took) < SLOWEST_S
        assert service.stop() == 0
    assert not [line for line in service.log if "Traceback" in line]


async def test_a_slow_request_is_told_why(pages: StoredPages) -> None:
    with running(pages.config) as service:
        for begun in (b"GET /healthz HT", HEAD + b"{"):
            reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
            writer.write(begun)
            answer = await asyncio.wait_for(reader.read(), 20)
            assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
            assert b'"request-timeout"' in answer
            writer.close()
        assert service.stop() == 0


async def test_probes_are_answered_while_every_connection_is_busy(pages: StoredPages) -> None:
    keys = make_keys(2)
    pages.store(keys)
    pages.hang(keys)
    with pages.serving() as service:
        port = service.port
        asked = "/v1/prefetch/r?wait_ms=60000"
        body = f'{{"model": "m", "request_id": "r", "keys": ["{keys[0].hex()}", "{keys[1].hex()}"]}}'.encode()
        begun = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        assert (await exchange(port, "POST /v1/prefetch", begun))[0] == 202
        waiting = [asyncio.create_task(exchange(port, f"GET {asked}")) for _ in range(MOST - 2)]
        for _ in range(3):  # by then the service has read what was sent before
            assert (await exchange(port, "GET /healthz"))[0] == 200
        more = [asyncio.create_task(exchange(port, f"GET {asked}")) for _ in range(6)]
        end = time.monotonic() + 20
        while True:
            status, head, answer = await exchange(port, "GET /v1/info")
            if status == 503:
                break
            assert time.monotonic() < end
        assert "connection: close" in head
        assert "too-many-connections" in answer
        async with _watched(port) as took:
            silent = [asyncio.create_task(_speak(port, _silent)) for _ in range(150)]
            await asyncio.sleep(0.5)
        assert max(took) < SLOWEST_S
        assert not [answer for answer in waiting if answer.done()]  # nobody lost his place
        pages.release()
        assert {(await answer)[0] for answer in waiting} == {200}
        assert {(await answer)[0] for answer in more} <= {200, 503}
        await asyncio.gather(*silent)
        assert (await exchange(port, "GET /v1/info"))[0] == 200
        assert service.stop() == 0
