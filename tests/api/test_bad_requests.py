"""What each kind of bad request gets: a 4xx problem with a stable slug, never a 500."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest
import pytest_asyncio

from support.live import Live, kv_only, live, make_keys, sum_of

# One service takes them all, one after another.
pytestmark = pytest.mark.asyncio(loop_scope="module")

JSON = "application/json"
MSGPACK = "application/msgpack"
KEYS = [key.hex() for key in make_keys(3)]
GOOD = {"model": "m", "keys": KEYS}


@dataclass(frozen=True)
class Bad:
    """One bad request and what it gets."""

    name: str
    status: int
    slug: str
    body: bytes = b""
    path: str = "/v1/prefetch"
    method: str = "POST"
    media: str = JSON
    headers: dict[str, str] = field(default_factory=dict)


def _json(name: str, status: int, slug: str, body: Any, path: str = "/v1/prefetch") -> Bad:
    return Bad(name, status, slug, json.dumps(body).encode(), path)


def _packed(name: str, status: int, slug: str, body: Any) -> Bad:
    return Bad(name, status, slug, msgpack.packb(body), media=MSGPACK)


def _field(name: str, value: Any, slug: str = "invalid-request") -> Bad:
    return _json(f"{name}={value!r:.40}", 422, slug, {**GOOD, name: value})


INVALID, UNPARSABLE = "invalid-request", "unparsable"
TABLE = [
    # unparsable
    Bad("empty body", 400, UNPARSABLE, b""),
    Bad("not JSON", 400, UNPARSABLE, b"{"),
    Bad("not UTF-8", 400, UNPARSABLE, b'{"model": "\xff"}'),
    Bad("NaN", 400, UNPARSABLE, b'{"model": NaN}'),
    Bad("deep JSON", 400, UNPARSABLE, b"[" * 50_000),
    Bad("cut MessagePack", 400, UNPARSABLE, msgpack.packb(GOOD)[:-5], media=MSGPACK),
    Bad("trailing MessagePack", 400, UNPARSABLE, msgpack.packb(GOOD) + b"\0", media=MSGPACK),
    Bad("deep MessagePack", 400, UNPARSABLE, b"\x91" * 5000 + b"\xc0", media=MSGPACK),
    Bad("random MessagePack", 400, UNPARSABLE, b"\xc1\xff\x00", media=MSGPACK),
    Bad("map with a number as key", 400, UNPARSABLE, msgpack.packb({1: 2}), media=MSGPACK),
    Bad("a number of very many digits", 400, UNPARSABLE, b'{"priority": ' + b"9" * 5000 + b"}"),
    Bad("half a surrogate pair", 400, UNPARSABLE, b'{"model": "\\ud800"}'),
    Bad("huge declared array", 400, UNPARSABLE, b"\xdd\xff\xff\xff\xff", media=MSGPACK),
    Bad("extension type", 400, UNPARSABLE, msgpack.packb({"model": msgpack.ExtType(5, b"x")}), media=MSGPACK),
    # wrong shape
    _json("a list", 422, INVALID, [1]),
    _json("null", 422, INVALID, None),
    _json("no model", 422, INVALID, {"keys": KEYS}),
    _json("no keys", 422, INVALID, {"model": "m"}),
    _json("unknown field", 422, INVALID, {**GOOD, "unknown": 1}),
    _json("very long unknown fields", 422, INVALID, {**GOOD, **{f"{i}" * 3000: 1 for i in range(10)}}),
    _json("unknown field, lookup", 422, INVALID, {**GOOD, "lease_ms": 1}, "/v1/lookup"),
    _json("unknown field, lease", 422, INVALID, {**GOOD, "wait_ms": 1}, "/v1/leases"),
    _json("unknown field, pin", 422, INVALID, {**GOOD, "ttl_ms": 1, "lease_ms": 1}, "/v1/pins"),
    _json("a pin without a time", 422, INVALID, GOOD, "/v1/pins"),
    _json("a pin for no time", 422, INVALID, {**GOOD, "ttl_ms": 0}, "/v1/pins"),
    _json("unknown field, evict", 422, INVALID, {**GOOD, "ttl_ms": 1}, "/v1/evict"),
    _json("a tenant without a name", 422, INVALID, {**GOOD, "tenant": ""}, "/v1/evict"),
    _json("unknown field, renew", 422, INVALID, {"ms": 1}, "/v1/leases/nobody/renew"),
    _json("renew for no time", 422, INVALID, {"lease_ms": 0}, "/v1/leases/nobody/renew"),
    _field("keys", "ab" * 16),
    _field("keys", {"0": KEYS[0]}),
    _field("keys", [1]),
    _field("keys", [None]),
    _field("keys", ["zz" * 32]),
    _field("keys", ["ab" * 15]),
    _field("keys", ["ab" * 65]),
    _field("keys", ["abc" * 11]),
    _field("keys", [" " + "ab" * 16]),
    _field("keys", ["ab " * 16]),
    _field("keys", [KEYS[0], KEYS[0].upper()], "duplicate-key"),
    _field("key_bytes", 32),
    _field("device_pages", 4),
    _field("device_pages", -1),
    _field("device_pages", 1.5),
    _field("device_pages", "1"),
    _field("device_pages", True),
    _field("device_pages", 2**70),
    _field("min_pages", -1),
    _field("priority", "high"),
    _field("priority", 2**63),
    _field("deadline_ms", -5),
    _field("deadline_ms", 10**12),
    _field("wait_ms", -1),
    _field("wait_ms", 10**9),
    _field("lease_ms", 0),
    _field("lease_ms", "long"),
    _field("tenant", ""),
    _field("tenant", 5),
    _field("request_id", ""),
    _field("request_id", "a b"),
    _field("request_id", "x" * 129),
    _field("request_id", "a\nb"),
    _field("model", 5),
    _packed("packed keys without key_bytes", 422, INVALID, {"model": "m", "keys": b"a" * 64}),
    _packed("packed keys of a wrong size", 422, INVALID, {"model": "m", "keys": b"a" * 65, "key_bytes": 32}),
    _packed("packed keys of too few bytes", 422, INVALID, {"model": "m", "keys": b"a" * 16, "key_bytes": 8}),
    _packed("a duplicate in packed keys", 422, "duplicate-key", {"model": "m", "keys": b"a" * 64, "key_bytes": 32}),
    _packed("short bin key", 422, INVALID, {"model": "m", "keys": [b"a"]}),
    # unknown things
    _json("unknown model", 404, "unknown-model", {**GOOD, "model": "other"}),
    _json("unknown model, lookup", 404, "unknown-model", {**GOOD, "model": "other"}, "/v1/lookup"),
    _json("unknown model, pin", 404, "unknown-model", {**GOOD, "model": "other", "ttl_ms": 1}, "/v1/pins"),
    _json("unknown model, evict", 404, "unknown-model", {**GOOD, "model": "other"}, "/v1/evict"),
    _json("unknown model, lease", 404, "unknown-model", {**GOOD, "model": "other"}, "/v1/leases"),
    Bad("unknown job", 404, "unknown-job", path="/v1/prefetch/nobody", method="GET"),
    Bad("finish of an unknown job", 404, "unknown-job", path="/v1/prefetch/nobody/finish"),
    Bad("odd id", 404, "unknown-job", path="/v1/prefetch/%00%ff", method="GET"),
    Bad("slash at the end", 404, "not-found", path="/v1/prefetch/nobody/", method="GET"),
    Bad("unknown route", 404, "not-found", path="/v1/nothing", method="GET"),
    Bad("path traversal", 404, "not-found", path="/v1/../../etc/passwd", method="GET"),
    Bad("unknown method", 405, "method-not-allowed", path="/healthz", method="PROPFIND"),
    Bad("wrong method", 405, "method-not-allowed", path="/v1/lookup", method="GET"),
    _json("renew of an unknown lease", 410, "lease-gone", {"lease_ms": 5}, "/v1/leases/nobody/renew"),
    Bad("bad query", 422, INVALID, path="/v1/prefetch/nobody?wait_ms=soon", method="GET"),
    # media and size
    Bad("form", 415, "unsupported-media-type", b"a=b", media="application/x-www-form-urlencoded"),
    Bad("text", 415, "unsupported-media-type", b"{}", media="text/plain"),
    _json("too many pages", 413, "too-large", {"model": "m", "keys": [key.hex() for key in make_keys(257)]}),
    Bad("too many bytes", 413, "too-large", b" " * 70_000),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    server, prefetch = {"max_body_bytes": 65536}, {"max_pages": 256}
    async with live(tmp_path_factory.mktemp("bad"), kv_only(64), server=server, prefetch=prefetch) as running:
        yield running


@pytest.mark.parametrize("bad", [pytest.param(bad, id=bad.name) for bad in TABLE])
async def test_bad_request(service: Live, bad: Bad) -> None:
    before = await service.scrape()
    headers = {"Content-Type": bad.media, **bad.headers}
    answer = await service.http.request(bad.method, bad.path, content=bad.body, headers=headers)
    assert (answer.status_code, answer.json()["type"]) == (bad.status, bad.slug)
    assert answer.headers["content-type"] == "application/problem+json"
    assert set(answer.json()) == {"type", "title", "status", "detail"}
    assert answer.json()["status"] == bad.status
    assert "Traceback" not in answer.text
    assert len(answer.content) < 2000
    # and the service goes on as if nothing had been asked
    good = await service.http.post("/v1/prefetch", json={**GOOD, "wait_ms": 1000})
    assert good.status_code == 200
    after = await service.quiet()
    assert sum_of(after, "prefetch_requests_total") == sum_of(before, "prefetch_requests_total") + 1


async def test_a_chunked_body_is_counted_while_it_is_read(service: Live) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b" " * 4096

    answer = await service.http.post("/v1/prefetch", content=endless(), headers={"Content-Type": JSON})
    assert (answer.status_code, answer.json()["type"]) == (413, "too-large")


async def test_the_same_id_with_another_body_is_a_conflict(service: Live) -> None:
    body = {**GOOD, "request_id": "one", "wait_ms": 1000}
    first = await service.http.post("/v1/prefetch", json=body)
    again = await service.http.post("/v1/prefetch", json={**body, "wait_ms": 5})
    assert (first.status_code, again.status_code) == (200, 200)
    assert again.json()["request_id"] == "one"
    for change in ({"keys": KEYS[:2]}, {"priority": 1}, {"tenant": "t"}, {"device_pages": 1}, {"lease_ms": 5}):
        other = await service.http.post("/v1/prefetch", json={**body, **change})
        assert (other.status_code, other.json()["type"]) == (409, "request-id-conflict")


async def test_a_method_that_no_route_takes_names_those_that_some_do(service: Live) -> None:
    answer = await service.http.put("/v1/prefetch/one")
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET")


async def test_what_is_no_http_is_a_problem_too(service: Live) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(b"HELO there\r\n\r\n")
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"application/problem+json" in head
    assert json.loads(body)["type"] == "unparsable"


async def test_errors_need_no_thread(service: Live) -> None:
    assert (await service.http.get("/v1/prefetch/nobody")).status_code == 404
    assert not [thread.name for thread in threading.enumerate() if "worker" in thread.name.lower()]
