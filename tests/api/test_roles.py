"""Roles: every route has one, documented and enforced, and a token can do no more than its role says."""

import itertools
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from fastapi import APIRouter

from api.security_tables import security_table
from forestage.api.auth import RoleRoute
from forestage.api.keyring import Keyring
from forestage.core.roles import Caller, Grant, Role
from support.live import Live, kv_only, live, make_keys

TENANTS = [{"name": "a", "min_share": 0.25}, {"name": "b"}]
#: Loading the machine's certificates takes longer than many a test.
_BARE = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
GRANTS = [
    *(Grant(f"any-{role.word}", Caller(role)) for role in Role),
    *(Grant(f"{tenant}-{role.word}", Caller(role, tenant)) for tenant in "ab" for role in Role),
]


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Live]:
    async with live(tmp_path, kv_only(16), token="any", grants=GRANTS, tenants=TENANTS) as running:
        yield running


def _as(service: Live, token: str) -> httpx2.AsyncClient:
    headers = {"Authorization": f"Bearer {token}"}
    url = f"http://127.0.0.1:{service.port}"
    return httpx2.AsyncClient(base_url=url, headers=headers, timeout=30, verify=_BARE)


async def _role_of_every_route(service: Live) -> dict[tuple[str, str], str]:
    document = (await service.http.get("/openapi.json")).json()
    return {
        (method.upper(), path): description["x-role"]
        for path, methods in document["paths"].items()
        for method, description in methods.items()
    }


async def test_the_document_says_the_role_of_every_route(service: Live) -> None:
    roles = await _role_of_every_route(service)
    documented = {tuple(route.split()): role for route, role in security_table("Roles", "least role")}
    assert roles == documented


async def test_every_route_runs_from_its_role_on(service: Live) -> None:
    for (method, path), word in (await _role_of_every_route(service)).items():
        least = 0 if word == "none" else Role[word.upper()]
        filled = path.replace("{", "").replace("}", "")
        for tenant, role in itertools.product(("any", "a"), Role):
            async with (
                _as(service, f"{tenant}-{role.word}") as http,
                http.stream(method, filled, json={} if method == "POST" else None) as answer,
            ):
                refused = answer.status_code == 403
                if path == "/v1/events" and tenant == "a":
                    assert refused
                    continue
                assert refused == (role < least), (method, path, role)
                if refused:
                    await answer.aread()
                    assert answer.json()["type"] == "role-needed"
                assert answer.status_code != 401
    assert service.engine.jobs == {}


async def test_a_route_without_a_role_cannot_be_made() -> None:
    router = APIRouter(route_class=RoleRoute)

    async def handle() -> None: ...

    with pytest.raises(TypeError, match="/new: say which role it needs"):
        router.get("/new")(handle)


async def test_no_route_is_made_past_the_roles(service: Live) -> None:
    inner = [route for part in service.app.routes for route in getattr(part, "routes", None) or [part]]
    made = {route.path for route in inner if isinstance(route, RoleRoute)}
    others = {getattr(route, "path", "") for route in inner if not isinstance(route, RoleRoute)}
    document = (await service.http.get("/openapi.json")).json()
    assert not made or made == set(document["paths"])
    assert not others & set(document["paths"])
    assert {path for path in others if path} <= {"/openapi.json", "/"}


async def test_demotion_takes_an_admin_among_hints_too(service: Live) -> None:
    keys = [key.hex() for key in make_keys(2)]
    action = {
        "action_id": "d",
        "action_type": "demote",
        "action_version": "1.0",
        "payload": {"model": "m", "keys": keys},
    }
    body = {"protocol_version": "1.0", "actions": [action]}
    for token, reason in (("any-write", "role-needed"), ("a-write", "role-needed"), ("a-admin", "not_resident")):
        async with _as(service, token) as http:
            (done,) = (await http.post("/v1/hints", json=body)).json()["actions"]
            assert done["reason"] == reason


async def test_a_pin_of_another_tenant_is_not_there_for_a_hint(service: Live) -> None:
    keys = make_keys(2)
    service.store(keys)
    await service.client.prefetch("m", keys, wait_ms=5000)
    pin_body = {"model": "m", "keys": [key.hex() for key in keys], "ttl_ms": 60_000}

    async def release(http: httpx2.AsyncClient, pin: str) -> str:
        payload = {"pin_id": pin}
        action = {"action_id": "r", "action_type": "release", "action_version": "1.0", "payload": payload}
        answer = await http.post("/v1/hints", json={"protocol_version": "1.0", "actions": [action]})
        outcome: str = answer.json()["actions"][0]["outcome"]
        return outcome

    async with _as(service, "a-write") as a, _as(service, "b-write") as b:
        pin = (await a.post("/v1/pins", json=pin_body)).json()["id"]
        assert await release(b, pin) == "missing"
        assert len(service.engine.pins) == 1
        assert await release(a, pin) == "accepted"
        assert len(service.engine.pins) == 0


async def test_a_reader_changes_nothing(service: Live) -> None:
    keys = make_keys(4)
    service.store(keys)
    job = await service.client.prefetch("m", keys, request_id="r", wait_ms=5000)
    assert job.lease is not None
    before = (await service.http.get("/v1/status")).json()
    body = {"model": "m", "keys": [key.hex() for key in make_keys(4, "other")]}
    async with _as(service, "any-read") as http:
        for path in ("/v1/prefetch", "/v1/leases", "/v1/pins", "/v1/writes", "/v1/evict", "/v1/hints"):
            assert (await http.post(path, json=body)).status_code == 403
        for path in ("/v1/prefetch/r", f"/v1/leases/{job.lease.id}", "/v1/pins/p", "/v1/writes/w"):
            assert (await http.delete(path)).status_code == 403
        assert (await http.post("/v1/lookup", json=body)).status_code == 200
        assert (await http.get("/v1/prefetch/r")).json()["pages"]["ready"] == 4
    after = (await service.http.get("/v1/status")).json()
    for name in ("jobs", "leases", "pins", "totals"):
        assert before[name] == after[name]
    await service.idle()


def test_a_keyring_takes_what_it_was_given_last() -> None:
    keyring = Keyring()
    assert keyring.is_open
    assert keyring.caller("") == Caller()
    keyring.replace([Grant("one", Caller(Role.READ)), Grant("two", Caller(Role.WRITE, "t"))])
    assert keyring.caller("Bearer one") == Caller(Role.READ)
    assert keyring.caller("bearer  two ") == Caller(Role.WRITE, "t")
    for refused in (
        "",
        "Bearer",
        "Bearer ",
        "Bearer on",
        "Bearer onee",
        "Basic one",
        "one",
        "Bearer \xff",
        "Bearer one two",
    ):
        assert keyring.caller(refused) is None, refused
    keyring.replace([Grant("three")])
    assert keyring.caller("Bearer one") is None
    assert keyring.caller("Bearer three") == Caller(Role.ADMIN)
    assert "three" not in repr(Grant("three")) + json.dumps(repr(vars(keyring)))
