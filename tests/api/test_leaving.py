"""A client that leaves: its own waiting POST is cancelled, nothing else is (FAULTS S5)."""

import asyncio
import http.client
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from api.raw import Leaving, leave, send_request
from faults.stored_pages import StoredPages
from forestage_client import Client
from support.live import Live, hybrid, live, make_keys, sum_of, until

KEYS = make_keys(8)
BODY = {"model": "m", "keys": [key.hex() for key in KEYS], "request_id": "r"}
both_ways = pytest.mark.parametrize("how", ["fin", "rst"])


@pytest.fixture(params=["", "secret"], ids=["open", "token"])
async def service(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Live]:
    async with live(tmp_path, hybrid(16, 2), token=request.param) as running:
        running.store(KEYS, states=[8])
        yield running


def _token(service: Live) -> str:
    return str(service.http.headers.get("authorization", "")).removeprefix("Bearer ")


def _post(service: Live, version: str = "1.1", **more: object) -> socket.socket:
    body = {**BODY, "wait_ms": 60_000, **more}
    return send_request(("127.0.0.1", service.port), "POST", "/v1/prefetch", body, _token(service), version)


async def _is_gone(service: Live, num_cancelled: int) -> None:
    """Wait until the client was noticed to be gone and its slots are free; within a second."""
    began = time.monotonic()
    await until(lambda: not service.engine.live and service.taken == 0)
    assert time.monotonic() - began < 1.0
    assert sum_of(await service.scrape(), "prefetch_requests_total", 'outcome="cancelled"') == num_cancelled


@both_ways
@pytest.mark.parametrize("phase", ["queued", "probing", "reserved", "part", "last"])
async def test_the_waiting_client_that_made_the_job(service: Live, phase: str, how: Leaving) -> None:
    if phase == "queued":
        service.engine.admission.budget_bytes = 1
        service.storage.fault(hold=True)
        service.store(make_keys(1, "other"), states=[1])
        await service.client.prefetch("m", make_keys(1, "other"), request_id="other")
    elif phase == "probing":
        service.storage.hang_probes()
    elif phase == "reserved":
        service.storage.fault(hold=True)
    else:
        service.storage.fault(0, KEYS[3 if phase == "part" else 7], hold=True)
    sock = _post(service)
    reached = {"queued": 0, "probing": 0, "reserved": 0, "part": 3, "last": 7}[phase]
    state = phase if phase in ("queued", "probing") else "loading"
    await until(lambda: "r" in service.engine.jobs)
    job = service.engine.jobs["r"]
    await until(lambda: job.state.value == state and job.contiguous == reached)
    leave(sock, how)
    await until(lambda: job.done, deadline_s=1)
    service.storage.release()  # a read that has begun keeps its slot until it ends
    if phase == "queued":
        await service.client.wait("other", 5)
        await service.client.cancel("other")
    await _is_gone(service, 1)
    cancelled = await service.client.get_prefetch("r")
    assert (cancelled.outcome, cancelled.lease, dict(cancelled.slots)) == ("cancelled", None, {})
    await service.idle()
    service.storage.fault()
    assert (await service.client.prefetch("m", KEYS, wait_ms=5000)).outcome == "complete"


@both_ways
async def test_one_that_does_not_wait(service: Live, how: Leaving) -> None:
    for turn in range(25):
        sock = _post(service, request_id=f"r{turn}", wait_ms=0)
        if how == "rst":  # which may overtake what was sent
            await until(lambda turn=turn: f"r{turn}" in service.engine.jobs)  # type: ignore[misc]
        leave(sock, how)
        await until(lambda turn=turn: f"r{turn}" in service.engine.jobs)  # type: ignore[misc]
        assert (await service.client.wait(f"r{turn}", 10)).outcome == "complete"
    await service.idle()


@both_ways
async def test_one_that_waits_in_a_get(service: Live, how: Leaving) -> None:
    service.storage.fault(0, KEYS[3], hold=True)
    await service.client.prefetch("m", KEYS, request_id="r")
    address, path = ("127.0.0.1", service.port), "/v1/prefetch/r?wait_ms=60000"
    sock = send_request(address, "GET", path, token=_token(service))
    await until(lambda: service.asked == 1)
    leave(sock, how)
    await until(lambda: service.asked == 0, deadline_s=1)
    assert not service.engine.jobs["r"].done
    service.storage.release()
    assert (await service.client.wait("r", 10)).outcome == "complete"
    await service.idle()


@both_ways
async def test_one_that_finishes_somebody_elses_job(service: Live, how: Leaving) -> None:
    service.engine.settings = replace(service.engine.settings, settle_s=5)
    service.storage.fault(hold=True)
    await service.client.prefetch("m", KEYS, request_id="r")
    await until(lambda: service.storage.open_reads > 0)
    sock = send_request(("127.0.0.1", service.port), "POST", "/v1/prefetch/r/finish", token=_token(service))
    await until(lambda: service.engine.jobs["r"].stopped)
    leave(sock, how)
    service.storage.release()
    done = await service.client.wait("r", 10)
    assert done.outcome in ("miss", "partial", "complete")
    await service.idle()


@both_ways
async def test_one_that_posts_a_known_id(service: Live, how: Leaving) -> None:
    service.storage.fault(0, KEYS[3], hold=True)
    made = await service.client.prefetch("m", KEYS, request_id="r")
    assert made.state != "done"
    sock = _post(service)
    await until(lambda: service.asked == 1)
    leave(sock, how)
    await until(lambda: service.asked == 0, deadline_s=1)
    assert not service.engine.jobs["r"].done
    service.storage.release()
    assert (await service.client.wait("r", 10)).outcome == "complete"
    await service.idle()


async def test_a_follower_of_the_one_that_left(service: Live) -> None:
    service.storage.fault(0, KEYS[3], hold=True)
    sock = _post(service)
    await until(lambda: "r" in service.engine.jobs and service.engine.jobs["r"].contiguous == 3)
    other = await service.client.prefetch("m", KEYS, request_id="other")
    leave(sock, "rst")
    await until(lambda: service.engine.jobs["r"].done, deadline_s=1)
    service.storage.release()
    assert (await service.client.wait(other.request_id, 10)).outcome == "complete"
    assert set(service.storage.reads.values()) == {1}
    await service.idle()


async def test_one_that_only_stops_sending_is_answered(service: Live) -> None:
    service.storage.fault(0, KEYS[3], hold=True)
    sock = _post(service)
    await until(lambda: "r" in service.engine.jobs and service.engine.jobs["r"].contiguous == 3)
    sock.shutdown(socket.SHUT_WR)
    await asyncio.sleep(0.3)
    assert not service.engine.jobs["r"].done
    service.storage.release()
    answer = http.client.HTTPResponse(sock, method="POST")
    await asyncio.to_thread(answer.begin)
    assert answer.status == 200
    assert json.loads(await asyncio.to_thread(answer.read))["outcome"] == "complete"
    assert await asyncio.to_thread(sock.recv, 1) == b""  # and closed
    sock.close()
    await service.idle()


async def test_one_that_stops_sending_and_then_leaves(service: Live) -> None:
    service.storage.fault(0, KEYS[3], hold=True)
    sock = _post(service)
    await until(lambda: "r" in service.engine.jobs and service.engine.jobs["r"].contiguous == 3)
    sock.shutdown(socket.SHUT_WR)
    await asyncio.sleep(0.2)
    leave(sock, "rst")
    await until(lambda: service.engine.jobs["r"].done, deadline_s=1)
    service.storage.release()
    await _is_gone(service, 1)


async def test_an_old_client_that_stops_sending_counts_as_gone(service: Live) -> None:
    service.storage.fault(0, KEYS[3], hold=True)
    sock = _post(service, version="1.0")
    await until(lambda: "r" in service.engine.jobs and service.engine.jobs["r"].contiguous == 3)
    sock.shutdown(socket.SHUT_WR)
    await until(lambda: service.engine.jobs["r"].done, deadline_s=1)
    assert await asyncio.to_thread(sock.recv, 1) == b""
    sock.close()
    service.storage.release()
    await _is_gone(service, 1)


async def test_one_that_leaves_in_the_middle_of_its_request(service: Live, caplog: pytest.LogCaptureFixture) -> None:
    head = b"POST /v1/prefetch HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: 500\r\n"
    if _token(service):
        head += f"Authorization: Bearer {_token(service)}\r\n".encode()
    for sent in (b"POST /v1", head + b"\r\n", head + b'\r\n{"model":'):
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(sent)
        await writer.drain()
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
    await until(lambda: service.asked == 0)
    assert len(service.engine.jobs) == 0
    assert not caplog.records
    await service.idle()


async def test_the_first_of_two_requests_on_one_connection(service: Live) -> None:
    service.storage.fault(0, KEYS[3], hold=True)
    sock = _post(service)
    sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: t\r\n\r\n")
    await until(lambda: "r" in service.engine.jobs and service.engine.jobs["r"].contiguous == 3)
    leave(sock, "rst")
    await until(lambda: service.engine.jobs["r"].done, deadline_s=1)
    service.storage.release()
    await _is_gone(service, 1)


def test_clients_of_a_real_service(tmp_path: Path) -> None:
    """The same with the event loop that the service has, where the end of input may come with the request."""
    (tmp_path / "token").write_text("secret")
    pages = StoredPages.make(tmp_path, server=f'port = 0\ntoken_file = "{tmp_path}/token"')
    pages.store(KEYS)
    held = make_keys(4, "held")
    pages.store(held)
    pages.hang(held)
    with pages.serving() as service, Client(service.url, token="secret", timeout_s=10) as client:
        address = ("127.0.0.1", service.port)
        for turn in range(200):
            send_request(address, "POST", "/v1/prefetch", {**BODY, "request_id": f"r{turn}"}, "secret").close()
        for turn in range(200):
            assert client.wait(f"r{turn}", 5).outcome == "complete"
            client.cancel(f"r{turn}")
        for how in ("fin", "rst"):
            body = {"model": "m", "keys": [key.hex() for key in held], "request_id": how, "wait_ms": 60_000}
            sock = send_request(address, "POST", "/v1/prefetch", body, "secret")
            _poll(lambda: 'jobs{state="loading"} 1' in client.metrics())
            if how == "fin":
                sock.shutdown(socket.SHUT_WR)  # only half of it
                time.sleep(0.3)
                assert client.get_prefetch(how).state == "loading"
            leave(sock, "fin" if how == "fin" else "rst")
            _poll(lambda how=how: client.get_prefetch(how).outcome == "cancelled", 1.0)  # type: ignore[misc]
        rss = _rss_bytes(service.process.pid)
        for turn in range(600):
            leave(send_request(address, "POST", "/v1/prefetch", {**BODY, "request_id": f"x{turn}"}, "secret"), "rst")
        assert client.prefetch("m", KEYS, wait_ms=5000).outcome == "complete"
        assert _rss_bytes(service.process.pid) - rss < 8 << 20
        pages.release()
        assert service.stop() == 0
    assert not [line for line in service.log if "Traceback" in line or "ERROR" in line]


def _poll(condition: Callable[[], bool], deadline_s: float = 5.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def _rss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024
