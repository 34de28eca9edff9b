"""What each kind of bad request gets: a 4xx problem with a stable slug, never a 500."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx2
import msgpack
import pytest
from support.live import Live, make_keys

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
    Bad("huge declared array", 400, UNPARSABLE, b"\xdd\xff\xff\xff\xff", media=MSGPACK),
    Bad("extension type", 400, UNPARSABLE, msgpack.packb({"model": msgpack.ExtType(5, b"x")}), media=MSGPACK),
    # wrong shape
    _json("a list", 422, INVALID, [1]),
    _json("null", 422, INVALID, None),
    _json("no model", 422, INVALID, {"keys": KEYS}),
    _json("no keys", 422, INVALID, {"model": "m"}),
    _json("unknown field", 422, INVALID, {**GOOD, "unknown": 1}),
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
    _json("unknown model, lease", 404, "unknown-model", {**GOOD, "model": "other"}, "/v1/leases"),
    Bad("unknown job", 404, "unknown-job", path="/v1/prefetch/nobody", method="GET"),
    Bad("finish of an unknown job", 404, "unknown-job", path="/v1/prefetch/nobody/finish"),
    Bad("odd id", 404, "unknown-job", path="/v1/prefetch/%00%ff", method="GET"),
    Bad("unknown route", 404, "not-found", path="/v1/nothing", method="GET"),
    Bad("path traversal", 404, "not-found", path="/v1/../../etc/passwd", method="GET"),
    Bad("wrong method", 405, "method-not-allowed", path="/v1/lookup", method="GET"),
    _json("renew of an unknown lease", 410, "lease-gone", {"lease_ms": 5}, "/v1/leases/nobody/renew"),
    Bad("bad query", 422, INVALID, path="/v1/prefetch/nobody?wait_ms=soon", method="GET"),
    # media and size
    Bad("form", 415, "unsupported-media-type", b"a=b", media="application/x-www-form-urlencoded"),
    Bad("text", 415, "unsupported-media-type", b"{}", media="text/plain"),
    _json("too many pages", 413, "too-large", {"model": "m", "keys": [key.hex() for key in make_keys(257)]}),
    Bad("too many bytes", 413, "too-large", b" " * 70_000),
]


@pytest.mark.parametrize("bad", [pytest.param(bad, id=bad.name) for bad in TABLE])
async def test_bad_request(service: Live, bad: Bad) -> None:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{service.port}") as http:
        headers = {"Content-Type": bad.media, **bad.headers}
        answer = await http.request(bad.method, bad.path, content=bad.body, headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (bad.status, bad.slug)
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["status"] == bad.status
        assert "Traceback" not in answer.text
        # and the service goes on as if nothing had been asked
        good = await http.post("/v1/prefetch", json={**GOOD, "wait_ms": 1000})
        assert good.status_code == 200
    await service.quiet()


async def test_a_chunked_body_is_counted_while_it_is_read(service: Live) -> None:
    async def endless() -> Any:
        for _ in range(1000):
            yield b" " * 4096

    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{service.port}") as http:
        answer = await http.post("/v1/prefetch", content=endless(), headers={"Content-Type": JSON})
    assert answer.status_code == 413


async def test_the_same_id_with_another_body_is_a_conflict(service: Live) -> None:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{service.port}") as http:
        body = {**GOOD, "request_id": "one", "wait_ms": 1000}
        first = await http.post("/v1/prefetch", json=body)
        again = await http.post("/v1/prefetch", json={**body, "wait_ms": 5})
        assert (first.status_code, again.status_code) == (200, 200)
        assert again.json()["request_id"] == "one"
        other = await http.post("/v1/prefetch", json={**body, "keys": KEYS[:2]})
        assert (other.status_code, other.json()["type"]) == (409, "request-id-conflict")
