"""Fills: pages copied into memory that another process has passed, and nothing written there after the answer."""

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from api.raw import Leaving, leave, send_request
from forestage.core.errors import GoneError
from forestage.core.fill_target import FillTarget
from forestage.core.job import PrefetchRequest
from forestage.pool.foreign import ForeignMemory
from forestage.prefetch.fills import Fill
from forestage.prefetch.regions import MAX_REGIONS
from support.live import PAGE_BYTES, Live, content, hybrid, live, make_keys, until
from support.region_memory import Memory, memory_of, register, send_memory

KEYS = make_keys(8)
NAMES = [key.hex() for key in KEYS]
WHOLE = 8 * PAGE_BYTES


def _page(memory: Memory, number: int) -> bytes:
    return memory.bytes()[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]


class Gate:
    """Holds every write to a region until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.writes = 0
        write = ForeignMemory.write

        def held(memory: ForeignMemory, offsets: Sequence[int], sizes: Sequence[int], data: memoryview) -> None:
            self.reached.set()
            assert self.opened.wait(30)
            self.writes += 1
            write(memory, offsets, sizes, data)

        monkeypatch.setattr(ForeignMemory, "write", held)

    async def wait(self) -> None:
        await until(self.reached.is_set)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Live]:
    async with live(tmp_path, hybrid(16, 4), server={"regions_uds": f"{tmp_path}/r"}) as running:
        running.store(KEYS, states=[4, 8])
        yield running


def _path(service: Live) -> str:
    return service.context.config.server.regions_uds


async def _send(service: Live, header: Any, fds: Sequence[int]) -> tuple[socket.socket, dict[str, Any]]:
    return await asyncio.to_thread(send_memory, _path(service), header, fds)


async def _register(service: Live, memory: Memory) -> tuple[socket.socket, str]:
    return await asyncio.to_thread(register, _path(service), memory)


def _body(region: str, pages: Sequence[int] = range(8), **more: Any) -> dict[str, Any]:
    """Ask for all pages, page i in the place pages[i]."""
    kv = {"run_bytes": [PAGE_BYTES], "offsets": [page * PAGE_BYTES for page in pages]}
    return {"model": "m", "keys": NAMES, "region": region, "targets": {"kv": kv}, **more}


async def _fill(service: Live, body: dict[str, Any]) -> tuple[int, Any]:
    answer = await service.http.post("/v1/fills", json=body)
    return answer.status_code, answer.json()


async def test_every_byte_in_its_place_and_nothing_else(service: Live) -> None:
    # Pages in reverse, each in two runs, keys and values in files of their own, and states behind.
    third = PAGE_BYTES // 4
    with memory_of(8 * third, 8 * (PAGE_BYTES - third) + 2 * PAGE_BYTES) as memory:
        sock, region = await _register(service, memory)
        offsets: list[int] = []
        for page in range(8):
            offsets += [(7 - page) * third, 8 * third + (7 - page) * (PAGE_BYTES - third)]
        kv = {"run_bytes": [third, PAGE_BYTES - third], "offsets": offsets}
        state = {"first": 7, "run_bytes": [PAGE_BYTES], "offsets": [8 * PAGE_BYTES]}
        body = {**_body(region), "targets": {"kv": kv, "state": state}, "include_keys": True}
        status, answer = await _fill(service, body)
        assert (status, answer["outcome"], answer["pages"]["ready"], answer["loaded"]) == (200, "complete", 8, 8)
        assert answer["filled"] == {"kv": {"first": 0, "pages": 8}, "state": {"first": 7, "pages": 1}}
        assert answer["keys"] == NAMES
        pages = [content(key, "kv") for key in reversed(KEYS)]
        expected = b"".join(page[:third] for page in pages) + b"".join(page[third:] for page in pages)
        assert memory.bytes() == expected + content(KEYS[7], "state") + b"\xee" * PAGE_BYTES
        assert (await _fill(service, body))[1]["loaded"] == 0  # they are resident now
        assert service.taken == 0
        sock.close()
        await until(lambda: not len(service.parts.service.regions))
        status, answer = await _fill(service, body)
        assert (status, answer["type"]) == (410, "region-gone")
    await service.idle()


async def test_pages_on_the_gpu_and_pages_that_are_not_asked_for_are_left_alone(service: Live) -> None:
    with memory_of(WHOLE) as memory:
        sock, region = await _register(service, memory)
        body = _body(region, device_pages=3)
        status, answer = await _fill(service, body)
        assert (status, answer["filled"]) == (200, {"kv": {"first": 3, "pages": 5}})
        assert memory.bytes()[: 3 * PAGE_BYTES] == b"\xee" * 3 * PAGE_BYTES
        assert [_page(memory, page) for page in range(3, 8)] == [content(key, "kv") for key in KEYS[3:]]
        sock.close()
    with memory_of(WHOLE) as memory:
        sock, region = await _register(service, memory)
        kv = {"run_bytes": [PAGE_BYTES], "offsets": [0, PAGE_BYTES], "first": 4}
        states = {"run_bytes": [PAGE_BYTES], "offsets": [PAGE_BYTES * page for page in (2, 3, 4)], "first": 2}
        body = {**_body(region), "keys": NAMES[:6], "targets": {"kv": kv, "state": states}}
        status, answer = await _fill(service, body)
        # Six pages can be resumed from four: nothing of pages 4 and 5, and the state after page 3.
        assert (status, answer["pages"]["ready"]) == (200, 4)
        assert answer["filled"] == {"kv": {"first": 4, "pages": 0}, "state": {"first": 3, "pages": 1}}
        assert _page(memory, 3) == content(KEYS[3], "state")
        sock.close()
    await service.idle()


async def test_pages_are_copied_while_others_are_on_their_way(service: Live) -> None:
    service.storage.fault(0, KEYS[5], hold=True)
    with memory_of(WHOLE) as memory:
        sock, region = await _register(service, memory)
        filling = asyncio.create_task(_fill(service, _body(region)))
        await until(lambda: _page(memory, 4) == content(KEYS[4], "kv"))
        assert memory.bytes()[5 * PAGE_BYTES :] == b"\xee" * 3 * PAGE_BYTES
        assert not filling.done()
        service.storage.release()
        status, answer = await filling
        assert (status, answer["filled"]["kv"]) == (200, {"first": 0, "pages": 8})
        assert memory.bytes() == b"".join(content(key, "kv") for key in KEYS)
        sock.close()
    await service.idle()


async def test_a_deadline_is_answered_with_what_has_come(service: Live) -> None:
    service.storage.fault(0, KEYS[5], hold=True)
    with memory_of(WHOLE) as memory:
        sock, region = await _register(service, memory)
        status, answer = await _fill(service, _body(region, deadline_ms=300))
        assert (status, answer["outcome"], answer["pages"]["ready"]) == (200, "partial", 4)
        assert answer["filled"] == {"kv": {"first": 0, "pages": 4}}
        assert answer["shortfall"] == {"deadline": 4}
        assert [_page(memory, page) for page in range(4)] == [content(key, "kv") for key in KEYS[:4]]
        after = memory.bytes()
        service.storage.release()  # the late read has its own slot, and stays there
        await service.quiet()
        assert memory.bytes() == after
        sock.close()
    await service.idle()


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_a_client_that_leaves(service: Live, how: Leaving, monkeypatch: pytest.MonkeyPatch) -> None:
    await _make_resident(service)
    gate = Gate(monkeypatch)
    with memory_of(WHOLE) as memory:
        sock, region = await _register(service, memory)
        asking = send_request(("127.0.0.1", service.port), "POST", "/v1/fills", _body(region))
        await gate.wait()
        leave(asking, how)
        await until(lambda: all(fill.stopped for fill in service.parts.service.fills._running))
        # A thread is in the middle of a page: its slot is held, and the request goes on.
        assert (service.asked, service.parts.service.fills.copying) == (1, 1)
        assert service.taken > 0
        gate.opened.set()
        await until(lambda: not service.asked and not service.taken)
        assert gate.writes == 1
        assert memory.bytes() == content(KEYS[0], "kv") + b"\xee" * 7 * PAGE_BYTES
        assert (await _fill(service, _body(region)))[0] == 200
        sock.close()
    await service.idle()


async def test_a_client_that_leaves_before_anything_came(service: Live) -> None:
    service.storage.hang_probes()
    with memory_of(WHOLE) as memory:
        sock, region = await _register(service, memory)
        asking = send_request(("127.0.0.1", service.port), "POST", "/v1/fills", _body(region))
        await until(lambda: len(service.engine.live) == 1)
        leave(asking, "rst")
        await until(lambda: not service.engine.live and not service.asked)
        service.storage.release()
        await service.quiet()
        assert memory.bytes() == b"\xee" * WHOLE
        sock.close()
    await service.idle()


async def test_a_region_that_ends_during_a_fill(service: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    await _make_resident(service)
    gate = Gate(monkeypatch)
    with memory_of(WHOLE) as memory:
        sock, region = await _register(service, memory)
        other, kept = await _register(service, memory)
        filling = asyncio.create_task(_fill(service, _body(region)))
        await gate.wait()
        foreign = service.parts.service.regions.find(region)
        sock.close()
        await until(lambda: len(service.parts.service.regions) == 1)
        assert (foreign.closed, foreign.users, filling.done()) == (True, 1, False)
        gate.opened.set()
        status, answer = await filling
        assert (status, answer["type"], foreign.users) == (410, "region-gone", 0)
        with pytest.raises(GoneError):
            foreign.use()
        assert memory.bytes() == content(KEYS[0], "kv") + b"\xee" * 7 * PAGE_BYTES
        assert (await _fill(service, _body(kept)))[0] == 200
        other.close()
    await service.idle()


async def _make_resident(service: Live) -> None:
    """Bring all pages, so that a fill has them in one go."""
    job = await service.client.prefetch("m", KEYS, wait_ms=10_000)
    assert job.pages.ready == 8
    await service.client.cancel(job.request_id)


def _fill_of(service: Live, region: str, request_id: str) -> Fill:
    """Begin a fill as the route does, of all pages one after another."""
    prefetches = service.parts.service
    job, _ = prefetches.submit(PrefetchRequest(request_id=request_id, model="m", keys=tuple(KEYS)))
    target = FillTarget(0, 0, 0, (PAGE_BYTES,), [page * PAGE_BYTES for page in range(8)])
    return Fill(job, prefetches.regions.find(region), [target])


async def test_a_fill_that_is_cancelled_waits_for_its_thread(service: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, fills = Gate(monkeypatch), service.parts.service.fills
    with memory_of(WHOLE) as memory:
        sock, region = await _register(service, memory)
        fill = _fill_of(service, region, "one")
        running = asyncio.create_task(fills.run(fill))
        await gate.wait()
        for _ in range(3):
            running.cancel()
            await until(lambda: fill.stopped)
            for _ in range(10):
                await asyncio.sleep(0)
        assert (running.done(), fills.copying, fill.memory.users) == (False, 1, 1)
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (fills.copying, fills.in_flight, fill.memory.users, gate.writes) == (0, 0, 0, 1)
        service.parts.service.forget("one")
        sock.close()
    await service.idle()


async def test_pages_count_only_while_their_lease_lives(service: Live) -> None:
    prefetches = service.parts.service
    with memory_of(WHOLE) as memory:
        sock, region = await _register(service, memory)
        service.storage.fault(0, KEYS[5], hold=True)
        fill = _fill_of(service, region, "cancelled")
        running = asyncio.create_task(prefetches.fills.run(fill))
        await until(lambda: fill.copied == [5])
        prefetches.cancel(fill.job)
        await running
        assert fill.filled() == [range(0)]
        service.storage.release()
        fill = _fill_of(service, region, "one")
        await prefetches.fills.run(fill)
        assert fill.job.lease is not None
        assert fill.filled() == [range(8)]
        await service.client.release(fill.job.lease.id)
        assert fill.filled() == [range(0)]
        sock.close()
    await service.idle()


async def test_the_end_of_the_service_waits_for_the_page_that_is_copied(
    service: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with memory_of(WHOLE) as memory:
        sock, region = await _register(service, memory)
        filling = asyncio.create_task(_fill(service, _body(region)))
        await gate.wait()
        stopping = asyncio.create_task(service.parts.service.stop(20))
        await until(lambda: service.engine.stopping)
        assert not filling.done()
        gate.opened.set()
        status, answer = await filling
        filled = answer["filled"]["kv"]["pages"]
        assert (status, answer["pages"]["ready"]) == (200, filled)
        assert await stopping
        assert memory.bytes()[: filled * PAGE_BYTES] == b"".join(content(key, "kv") for key in KEYS[:filled])
        assert await asyncio.to_thread(sock.recv, 1) == b""  # the region ends with the service
        sock.close()


async def test_a_file_that_is_shortened_is_an_error_and_no_signal(service: Live) -> None:
    with memory_of(WHOLE) as memory:
        sock, region = await _register(service, memory)
        os.ftruncate(memory.fds[0], 3 * PAGE_BYTES)
        status, answer = await _fill(service, _body(region))
        assert (status, answer["type"]) == (410, "region-gone")
        assert "shortened" in answer["detail"]
        assert os.fstat(memory.fds[0]).st_size == 3 * PAGE_BYTES
        sock.close()
    await service.idle()


KV = {"run_bytes": [PAGE_BYTES], "offsets": [page * PAGE_BYTES for page in range(8)]}
STATE = {"run_bytes": [PAGE_BYTES], "first": 7, "offsets": [0]}


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ({"kv": {**KV, "offsets": [0, PAGE_BYTES - 1]}}, "overlap"),
        ({"kv": KV, "state": STATE}, "overlap"),
        ({"kv": {**KV, "offsets": [WHOLE - PAGE_BYTES + 1]}}, "leaves the region"),
        ({"kv": {**KV, "offsets": [2**62]}}, "leaves the region"),
        ({"kv": {**KV, "offsets": [3 * PAGE_BYTES - 100]}}, "one of its files"),
        ({"kv": {**KV, "run_bytes": [PAGE_BYTES - 1]}}, "a page has 4096 bytes"),
        ({"kv": {"run_bytes": [96, 4000], "offsets": [0, 96, 4096]}}, "no whole pages"),
        ({"kv": {**KV, "first": 1}}, "pages up to 9"),
        ({"kv": {**KV, "shard": 1}}, "but there are 1"),
        ({"other": KV}, "no component"),
        ({"kv": {**KV, "offsets": [-1]}}, "greater than or equal to 0"),
        ({"kv": {**KV, "run_bytes": [PAGE_BYTES, 0]}}, "greater than or equal to 1"),
        ({"kv": {**KV, "run_bytes": []}}, "at least 1"),
        ({}, "at least 1"),
    ],
)
async def test_wrong_places_are_refused(service: Live, targets: dict[str, Any], said: str) -> None:
    with memory_of(3 * PAGE_BYTES, 5 * PAGE_BYTES) as memory:
        sock, region = await _register(service, memory)
        status, answer = await _fill(service, {**_body(region), "targets": targets})
        assert (status, answer["type"]) == (422, "invalid-request")
        assert said in answer["detail"]
        assert memory.bytes() == b"\xee" * WHOLE
        sock.close()
    assert not service.engine.jobs


async def test_too_many_runs_are_refused(service: Live) -> None:
    with memory_of(WHOLE) as memory:
        sock, region = await _register(service, memory)
        kv = {"run_bytes": [1] * PAGE_BYTES, "offsets": list(range(17 * PAGE_BYTES))}
        status, answer = await _fill(service, {**_body(region), "targets": {"kv": kv}})
        assert (status, answer["type"]) == (413, "too-large")
        sock.close()


def _sealed() -> int:
    fd = os.memfd_create("read-only", os.MFD_CLOEXEC)
    os.write(fd, b"x" * PAGE_BYTES)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    return again


def _hole() -> int:
    fd = os.memfd_create("hole", os.MFD_CLOEXEC)
    os.ftruncate(fd, PAGE_BYTES)
    return fd


HEADER = {"version": 1, "files": 1}


@pytest.mark.parametrize(
    ("header", "make", "said"),
    [
        (HEADER, lambda: os.memfd_create("empty", os.MFD_CLOEXEC), "empty"),
        (HEADER, _hole, "not all of its memory"),
        (HEADER, _sealed, "not open for reading and writing"),
        (HEADER, lambda: os.open("/dev/null", os.O_RDWR), "no file in shared memory"),
        (HEADER, lambda: os.open("/proc/self/status", os.O_RDONLY), "no file in shared memory"),
        ({**HEADER, "files": 2}, _hole, "1 descriptors"),
        ({**HEADER, "version": 2}, _hole, "version"),
        (b"[" * 4000, _hole, "version"),
        (b"x" * 5000, _hole, "4096 bytes"),
    ],
)
async def test_what_is_no_memory_is_refused(service: Live, header: Any, make: Any, said: str) -> None:
    fd, open_before = make(), len(os.listdir("/proc/self/fd"))
    sock, answer = await _send(service, header, [fd])
    assert answer["error"] == "invalid-request"
    assert said in answer["detail"]
    sock.close()
    await until(lambda: len(os.listdir("/proc/self/fd")) == open_before)
    os.close(fd)


async def test_there_are_only_so_many_regions(service: Live) -> None:
    with memory_of(PAGE_BYTES) as memory:
        kept = [(await _register(service, memory))[0] for _ in range(MAX_REGIONS)]
        sock, answer = await _send(service, HEADER, memory.fds)
        assert answer["error"] == "too-many-regions"
        sock.close()
        kept.pop().close()
        await until(lambda: len(service.parts.service.regions) == MAX_REGIONS - 1)
        kept.append((await _register(service, memory))[0])
        for sock in kept:
            sock.close()
        await until(lambda: not len(service.parts.service.regions))
