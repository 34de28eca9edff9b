"""Limits on counts: what is beyond them is refused in words, takes nothing, and ends with what it was about."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from forestage.config import Config
from support.live import Live, kv_only, live, make_keys, until

SMALL: dict[str, Any] = {
    "prefetch": {"max_jobs": 3, "keep_done_ms": 60_000, "max_pages": 8},
    "lease": {"max_leases": 4, "max_pins": 2},
    "writes": {"max_writes": 2},
}


def _body(keys: list[bytes], **more: object) -> dict[str, Any]:
    return {"model": "m", "keys": [key.hex() for key in keys], **more}


def _is_limit(answer: httpx2.Response) -> bool:
    return (answer.status_code, answer.json()["type"], answer.headers["retry-after"]) == (429, "limit-reached", "1")


@contextmanager
def _held(service: Live, key: bytes) -> Iterator[None]:
    service.storage.fault(0, key, hold=True)
    try:
        yield
    finally:
        service.storage.release()
        service.storage.fault()


async def test_jobs_under_way(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(64), **SMALL) as service:
        chains = [make_keys(2, f"chain {i}") for i in range(4)]
        for keys in chains:
            service.store(keys)
        service.storage.hang_probes()
        for i, keys in enumerate(chains[:3]):
            assert (await service.http.post("/v1/prefetch", json=_body(keys, request_id=str(i)))).status_code == 202
        assert _is_limit(await service.http.post("/v1/prefetch", json=_body(chains[3])))
        assert len(service.engine.jobs) == 3
        await service.http.delete("/v1/prefetch/0")
        assert (await service.http.post("/v1/prefetch", json=_body(chains[3]))).status_code == 202
        service.storage.release()
        await until(lambda: not service.engine.live)


async def test_the_oldest_of_too_many_finished_jobs_is_forgotten(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(64), **SMALL) as service:
        for i in range(6):
            await service.client.prefetch("m", make_keys(1, str(i)), request_id=str(i), wait_ms=5000)
        assert list(service.engine.jobs) == ["3", "4", "5"]
        await service.client.cancel("4")
        await service.client.prefetch("m", make_keys(1, "6"), request_id="6", wait_ms=5000)
        assert list(service.engine.jobs) == ["3", "5", "6"]
        await service.idle()


async def test_pages_of_all_jobs_together(tmp_path: Path) -> None:
    small: dict[str, Any] = {**SMALL, "prefetch": {"max_pages": 1, "max_jobs": 1000}}
    async with live(tmp_path, kv_only(64), **small) as service:
        service.storage.hang_probes()
        statuses = []
        for i in range(66):
            answer = await service.http.post("/v1/prefetch", json=_body(make_keys(1, str(i))))
            statuses.append(answer.status_code)
        assert statuses == [202] * 64 + [429] * 2
        service.storage.release()
        await until(lambda: not service.engine.live)
        assert service.engine.live_pages == 0


async def test_leases(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(64), **SMALL) as service:
        keys = make_keys(2)
        service.store(keys)
        await service.client.prefetch("m", keys, wait_ms=5000)
        for _ in range(3):
            assert (await service.http.post("/v1/leases", json=_body(keys))).status_code == 200
        assert _is_limit(await service.http.post("/v1/leases", json=_body(keys)))
        assert _is_limit(await service.http.post("/v1/prefetch", json=_body(keys)))  # it would want one
        lease = next(iter(service.engine.leases))
        await service.client.release(lease.id)
        assert (await service.http.post("/v1/leases", json=_body(keys))).status_code == 200
        await service.idle()


async def test_pins(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(64), **SMALL) as service:
        keys = make_keys(2)
        service.store(keys)
        await service.client.prefetch("m", keys, wait_ms=5000)
        pins = [(await service.http.post("/v1/pins", json=_body(keys, ttl_ms=60_000))).json()["id"] for _ in range(2)]
        assert _is_limit(await service.http.post("/v1/pins", json=_body(keys, ttl_ms=60_000)))
        action = {
            "action_id": "a",
            "action_type": "pin",
            "action_version": "1.0",
            "payload": _body(keys, ttl_ms=60_000),
        }
        hints = await service.http.post("/v1/hints", json={"protocol_version": "1.0", "actions": [action]})
        assert hints.json()["actions"][0]["reason"] == "limit-reached"
        for pin in pins:
            await service.http.delete(f"/v1/pins/{pin}")
        await service.idle()


async def test_writes(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(64), **SMALL) as service:
        bodies = [_body(make_keys(1, str(i))) for i in range(2)]
        ids = [(await service.http.post("/v1/writes", json=body)).json()["id"] for body in bodies]
        assert _is_limit(await service.http.post("/v1/writes", json=_body(make_keys(1, "more"))))
        await service.http.delete(f"/v1/writes/{ids[0]}")
        assert (await service.http.post("/v1/writes", json=_body(make_keys(1, "more")))).status_code == 201


async def test_requests_of_one_tenant_at_once(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"tenants": [{"name": "a"}, {"name": "b"}], "server": {"max_tenant_requests": 2}}
    tokens = {"a": "token-of-a", "b": "token-of-b"}
    async with live(tmp_path, kv_only(64), token="any", tenant_tokens=tokens, **settings) as service:
        keys = make_keys(2)
        service.store(keys)
        as_a, as_b = ({"Authorization": f"Bearer token-of-{tenant}"} for tenant in "ab")
        with _held(service, keys[0]):
            waiting = [
                asyncio.create_task(
                    service.http.post("/v1/prefetch", json=_body(keys, wait_ms=20_000, request_id=i), headers=as_a)
                )
                for i in "12"
            ]
            await until(lambda: len(service.engine.jobs) == 2)
            assert _is_limit(await service.http.get("/v1/info", headers=as_a))
            assert (await service.http.get("/v1/info", headers=as_b)).status_code == 200
            assert (await service.http.get("/v1/info")).status_code == 200
        assert [(await answer).status_code for answer in waiting] == [200, 200]
        assert (await service.http.get("/v1/info", headers=as_a)).status_code == 200


def test_no_count_is_without_a_limit() -> None:
    """Whatever a configuration says, there is one: no setting takes "unlimited"."""
    limits = {
        "server": ("max_body_bytes", "max_connections", "max_tenant_requests", "request_timeout_ms"),
        "prefetch": ("max_pages", "queue_limit", "max_jobs"),
        "lease": ("max_leases", "max_pins"),
        "writes": ("max_writes",),
        "events": ("buffer", "max_listeners"),
    }
    for section, names in limits.items():
        fields = type(Config.model_fields[section].default).model_fields
        for name in names:
            assert isinstance(fields[name].default, int), name
            assert fields[name].default > 0, name
