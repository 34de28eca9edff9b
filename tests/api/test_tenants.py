"""Tenants over HTTP: shares, tokens that say who calls, and what one tenant can know of another."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from support.configs import write_config
from support.live import Live, kv_only, live, make_keys
from support.running import running

TENANTS = [{"name": "a", "min_share": 0.5}, {"name": "b", "min_share": 0.25, "max_share": 0.5}]
TOKENS = {"a": "token-of-a", "b": "token-of-b"}


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Live]:
    async with live(tmp_path, kv_only(16), token="any", tenant_tokens=TOKENS, tenants=TENANTS) as running_service:
        yield running_service


def _as(service: Live, tenant: str) -> httpx2.AsyncClient:
    headers = {"Authorization": f"Bearer {TOKENS[tenant]}"}
    return httpx2.AsyncClient(base_url=f"http://127.0.0.1:{service.port}", headers=headers, timeout=30)


def _body(keys: list[bytes], **more: object) -> dict[str, object]:
    return {"model": "m", "keys": [key.hex() for key in keys], **more}


async def test_shares_bound_what_is_granted(service: Live) -> None:
    keys = make_keys(16)
    service.store(keys)
    for tenant, grantable in [("a", 12), ("b", 8), ("default", 4), ("nobody", 4)]:
        assert (await service.client.lookup("m", keys, tenant=tenant)).pages.grantable == grantable
    assert (await service.client.lookup("m", keys)).pages.grantable == 4
    job = await service.client.prefetch("m", keys, tenant="b", wait_ms=5000)
    assert (job.pages.ready, job.shortfall) == (8, {"host_capacity": 8})
    await service.client.cancel(job.request_id)
    leased = await service.client.lease("m", keys, tenant="default")
    assert (leased.pages.host, leased.pages.ready) == (8, 4)
    assert leased.lease is not None
    await service.client.release(leased.lease.id)
    await service.idle()


async def test_a_token_says_who_calls(service: Live) -> None:
    keys = make_keys(16)
    service.store(keys)
    async with _as(service, "b") as b:
        for path in ("/v1/prefetch", "/v1/lookup", "/v1/leases", "/v1/pins", "/v1/evict", "/v1/writes"):
            more: dict[str, object] = {"ttl_ms": 1000} if path == "/v1/pins" else {}
            refused = await b.post(path, json=_body(keys, tenant="a", **more))
            assert (refused.status_code, refused.json()["type"]) == (403, "other-tenant"), path
            assert "a" not in refused.json()["detail"].split()
        for own in ({}, {"tenant": "b"}):
            assert (await b.post("/v1/lookup", json=_body(keys, **own))).json()["pages"]["grantable"] == 8
    async with _as(service, "a") as a:
        assert (await a.post("/v1/lookup", json=_body(keys))).json()["pages"]["grantable"] == 12
    assert service.engine.jobs == {}


async def test_a_job_of_another_tenant_is_not_there(service: Live) -> None:
    keys = make_keys(4)
    service.store(keys)
    async with _as(service, "a") as a, _as(service, "b") as b:
        body = _body(keys, request_id="r", wait_ms=5000)
        assert (await a.post("/v1/prefetch", json=body)).json()["outcome"] == "complete"
        for answer in (await b.get("/v1/prefetch/r"), await b.post("/v1/prefetch/r/finish")):
            unknown = await b.get("/v1/prefetch/never")
            assert (answer.status_code, answer.json()) == (404, unknown.json())
        assert (await b.delete("/v1/prefetch/r")).status_code == 204
        assert (await a.get("/v1/prefetch/r")).json()["pages"]["ready"] == 4
        assert (await service.client.get_prefetch("r")).pages.ready == 4  # the service-wide token sees all
        assert (await a.delete("/v1/prefetch/r")).status_code == 204
    assert service.engine.jobs == {}
    await service.idle()


async def test_an_equal_key_is_a_hit_and_any_other_says_nothing(service: Live) -> None:
    keys = make_keys(4)
    service.store(keys)
    async with _as(service, "a") as a, _as(service, "b") as b:
        job = (await a.post("/v1/prefetch", json=_body(keys, wait_ms=5000))).json()
        salted = (await b.post("/v1/lookup", json=_body(make_keys(4, "salt")))).json()["pages"]
        assert salted == {"requested": 4, "host": 0, "stored": 0, "restorable": 0, "grantable": 0}
        assert (await b.post("/v1/lookup", json=_body(keys))).json()["pages"]["host"] == 4
        assert (await a.delete(f"/v1/leases/{job['lease']['id']}")).status_code == 204
    await service.idle()


async def test_no_tenant_becomes_a_label(service: Live) -> None:
    keys = make_keys(4)
    service.store(keys)
    for tenant in ("a", "secret-tenant"):
        await service.client.prefetch("m", keys, tenant=tenant, wait_ms=5000)
    text = await service.client.metrics()
    assert not [line for line in text.splitlines() if "secret-tenant" in line or "tenant=" in line or '="a"' in line]


@pytest.mark.parametrize("with_server_token", [True, False])
def test_tokens_from_files(tmp_path: Path, with_server_token: bool) -> None:
    """Whichever token is configured, every route but probes and metrics wants one."""
    for name, secret in [("server", "any"), ("a", "token-of-a")]:
        (tmp_path / name).write_text(secret)
    server = "port = 0" + (f'\ntoken_file = "{tmp_path}/server"' if with_server_token else "")
    tenants = f'[[tenants]]\nname = "a"\nmin_share = 0.5\ntoken_file = "{tmp_path}/a"\n[[tenants]]\nname = "b"'
    config = write_config(tmp_path, server=server, more=tenants)
    with running(config) as service, httpx2.Client(base_url=service.url) as http:
        statuses = {}
        for secret in ("any", "token-of-a", "", "other"):
            headers = {"Authorization": f"Bearer {secret}"} if secret else {}
            body = json.dumps(_body(make_keys(1), tenant="b"))
            statuses[secret] = http.post("/v1/lookup", content=body, headers=headers).status_code
        assert statuses == {"any": 200 if with_server_token else 401, "token-of-a": 403, "": 401, "other": 401}
        assert http.get("/healthz").status_code == http.get("/metrics").status_code == 200
        assert service.stop() == 0


async def test_what_one_tenant_has_another_cannot_touch(service: Live) -> None:
    keys = make_keys(8)
    service.store(keys[:4])
    async with _as(service, "a") as a, _as(service, "b") as b:
        job = (await a.post("/v1/prefetch", json=_body(keys[:4], wait_ms=5000, request_id="mine"))).json()
        lease, pin = job["lease"]["id"], (await a.post("/v1/pins", json=_body(keys[:4], ttl_ms=60_000))).json()["id"]
        write = (await a.post("/v1/writes", json=_body(keys))).json()["id"]
        assert (await b.post(f"/v1/leases/{lease}/renew", json={"lease_ms": 1})).status_code == 410
        for path in (f"/v1/leases/{lease}", f"/v1/pins/{pin}", f"/v1/writes/{write}"):
            assert (await b.delete(path)).status_code == 204
        assert (await b.post(f"/v1/writes/{write}/commit")).status_code == 404
        assert (await b.get(f"/v1/writes/{write}")).status_code == 404
        engine = service.parts.service.engine
        assert (len(engine.leases), len(engine.pins)) == (1, 1)
        # Their owner, and the token of the whole service, can.
        assert (await a.post(f"/v1/leases/{lease}/renew", json={"lease_ms": 1000})).status_code == 200
        assert (await service.http.get(f"/v1/writes/{write}")).json()["committed"] == 0
        for path in (f"/v1/leases/{lease}", f"/v1/pins/{pin}", f"/v1/writes/{write}"):
            assert (await a.delete(path)).status_code == 204
        assert (len(engine.leases), len(engine.pins), list(engine.writes)) == (0, 0, [])
