"""Who may call: bearer tokens in all their spellings, and the unix socket."""

import asyncio
import contextlib
import json
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from api.raw import exchange, send_request
from support.configs import write_config
from support.live import Live, kv_only, live, make_keys
from support.running import running

TOKEN = "correct-horse~battery.staple"
ROUTES = [
    ("POST", "/v1/prefetch"),
    ("GET", "/v1/prefetch/r"),
    ("DELETE", "/v1/prefetch/r"),
    ("POST", "/v1/prefetch/r/finish"),
    ("POST", "/v1/lookup"),
    ("POST", "/v1/leases"),
    ("POST", "/v1/leases/l/renew"),
    ("DELETE", "/v1/leases/l"),
    ("POST", "/v1/pins"),
    ("DELETE", "/v1/pins/p"),
    ("POST", "/v1/evict"),
    ("GET", "/v1/pool"),
    ("GET", "/v1/models"),
    ("GET", "/v1/info"),
    ("GET", "/v1/status"),
    ("GET", "/v1/prefetch/r/timeline"),
    ("GET", "/"),
    ("GET", "/openapi.json"),
    ("GET", "/unknown"),
    ("GET", "/healthz/"),
    ("GET", "//healthz"),
    ("GET", "/v1/../healthz"),
    ("PUT", "/v1/pool"),
]
REFUSED = [
    b"",
    b"Bearer",
    b"Bearer ",
    b"Bearer wrong",
    b"Bearer " + TOKEN.encode() + b"x",
    b"Bearer " + TOKEN.encode()[:-1],
    b"Bearer " + TOKEN.upper().encode(),
    b"Basic " + TOKEN.encode(),
    b"Token " + TOKEN.encode(),
    b"Bearer" + TOKEN.encode(),
    b"Bearer " + TOKEN.encode() + b" more",
    b"Bearer " + TOKEN.encode() + b", Bearer " + TOKEN.encode(),
    b"Bearer \xff\xfe",
    b"Bearer " + b"x" * 10_000,
    TOKEN.encode(),
]
TAKEN = [b"Bearer " + TOKEN.encode(), b"bearer " + TOKEN.encode(), b"BEARER  " + TOKEN.encode() + b" "]


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Live]:
    async with live(tmp_path, kv_only(8), token=TOKEN) as locked:
        yield locked


async def test_every_route_but_probes_wants_the_token(service: Live) -> None:
    for method, path in ROUTES:
        status, head, body = await exchange(service.port, f"{method} {path}")
        assert (status, json.loads(body)["type"]) == (401, "unauthorized"), path
        assert "www-authenticate: bearer" in head
        assert "content-type: application/problem+json" in head
        assert TOKEN not in body
    for path in ("/healthz", "/readyz", "/metrics"):
        assert (await exchange(service.port, f"GET {path}"))[0] == 200
        assert (await exchange(service.port, f"GET {path}", b"Authorization: Bearer wrong"))[0] == 200


async def test_odd_headers(service: Live) -> None:
    for value in REFUSED:
        status, _, _ = await exchange(service.port, "GET /v1/info", b"Authorization: " + value)
        assert status == 401, value
    for value in TAKEN:
        status, _, _ = await exchange(service.port, "GET /v1/info", b"Authorization: " + value)
        assert status == 200, value
    two = [b"Authorization: Bearer wrong", b"Authorization: " + TAKEN[0]]
    assert (await exchange(service.port, "GET /v1/info", *two))[0] == 401


async def test_a_refused_caller_changes_nothing(service: Live) -> None:
    keys = make_keys(2)
    service.store(keys)
    job = await service.client.prefetch("m", keys, request_id="r", wait_ms=5000)
    assert job.lease is not None
    for path in ("/v1/prefetch/r", f"/v1/leases/{job.lease.id}"):
        assert (await exchange(service.port, f"DELETE {path}"))[0] == 401
    service.http.headers["Authorization"] = "Bearer wrong"
    body = {"model": "m", "keys": [key.hex() for key in keys], "request_id": "other"}
    assert (await service.http.post("/v1/prefetch", json=body)).status_code == 401
    assert (await service.client.get_prefetch("r")).lease is not None
    assert set(service.engine.jobs) == {"r"}


def test_the_unix_socket_beside_tcp(tmp_path: Path) -> None:
    path = tmp_path / "run" / "forestage.sock"
    (tmp_path / "token").write_text(f"\ufeff{TOKEN}\n")
    server = f'port = 0\nuds = "{path}"\ntoken_file = "{tmp_path}/token"'
    config = write_config(tmp_path, server=server)
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # left by a service that was killed: it is replaced
    with running(config) as service:
        assert f"http://127.0.0.1:{service.port} unix:{path} " in service.ready
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        headers = {"Authorization": f"Bearer {TOKEN}"}
        for transport in (None, httpx2.HTTPTransport(uds=str(path))):
            with httpx2.Client(base_url=service.url, transport=transport) as http:
                assert http.get("/healthz").status_code == 200
                assert http.get("/v1/info").status_code == 401
                assert http.get("/v1/info", headers=headers).json()["models"] == ["m"]
        # one that leaves at once has asked all the same
        body = {"model": "m", "keys": [key.hex() for key in make_keys(2)], "request_id": "left"}
        send_request(str(path), "POST", "/v1/prefetch", body, TOKEN).close()
        with httpx2.Client(base_url=service.url, headers=headers) as http:
            assert http.get("/v1/prefetch/left?wait_ms=5000").json()["outcome"] == "miss"
        assert service.stop() == 0
    assert not path.exists()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 200_000 + b"\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: " + b"b" * (4 << 20) + b"\r\n\r\n",
    ],
    ids=["many headers", "one header"],
)
async def test_a_head_without_end_is_cut(service: Live, head: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    with contextlib.suppress(ConnectionError):
        writer.write(head)
        await writer.drain()
    with contextlib.suppress(ConnectionError):
        answer = await asyncio.wait_for(reader.read(), 10)
        assert not answer or answer.startswith(b"HTTP/1.1 431 ")
    writer.close()
    async with httpx2.AsyncClient() as http:
        assert (await http.get(f"http://127.0.0.1:{service.port}/healthz")).status_code == 200


async def test_a_head_just_too_large_is_told_so(service: Live) -> None:
    async with httpx2.AsyncClient() as http:
        url = f"http://127.0.0.1:{service.port}/healthz"
        assert (await http.get(url, headers={"A": "b" * 60_000})).status_code == 200
        answer = await http.get(url, headers={"A": "b" * 70_000})
        assert (answer.status_code, answer.json()["type"]) == (431, "too-large")
