"""Server-sent events: what a listener knows is what is resident, however slow it is and whenever it comes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from api.raw import Leaving, leave, send_request
from support.live import Live, hybrid, kv_only, live, make_keys, until


@dataclass
class Listener:
    """Reads one stream. `resident` is what it knows, by model and component."""

    lines: AsyncIterator[str]
    resident: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    id: str = ""

    async def next(self) -> str:
        """Take in one event; return its name."""
        event, data = "", {}
        async with asyncio.timeout(20):
            async for line in self.lines:
                name, _, value = line.partition(": ")
                if name == "id":
                    self.id = value
                elif name == "event":
                    event = value
                elif name == "data":
                    data = json.loads(value)
                elif not line and event:
                    break
            else:
                return "end"
        self._take(event, data)
        self.seen.append(event)
        return event

    def _take(self, event: str, data: dict[str, Any]) -> None:
        if event == "reset":
            self.resident.clear()
        elif event in ("stored", "removed"):
            pages = self.resident.setdefault((data["model"], data["component"]), set())
            keys = set(data["keys"])
            assert len(keys) == len(data["keys"])
            assert keys <= pages if event == "removed" else not keys & pages
            pages ^= keys

    async def until_ready(self) -> None:
        while await self.next() != "ready":
            pass

    async def until_known(self, keys: list[bytes], component: str = "kv") -> None:
        while self.resident.get(("m", component), set()) != {key.hex() for key in keys}:
            await self.next()


@asynccontextmanager
async def listening(service: Live, last_id: str = "", query: str = "") -> AsyncIterator[Listener]:
    headers = {"Last-Event-ID": last_id} if last_id else {}
    async with service.http.stream("GET", f"/v1/events{query}", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].partition(";")[0] == "text/event-stream"
        others = service.asked - 1
        yield Listener(answer.aiter_lines())
    await until(lambda: service.asked <= others)


async def _bring(service: Live, keys: list[bytes]) -> None:
    service.store(keys)
    job = await service.client.prefetch("m", keys, wait_ms=10_000)
    assert job.pages.ready == len(keys)
    await service.client.cancel(job.request_id)


async def test_a_listener_knows_what_is_resident(tmp_path: Path) -> None:
    async with live(tmp_path, hybrid(8, 4)) as service:
        a, b = make_keys(6), make_keys(8, "b")
        service.store([*a, *b], states=[])
        service.store(a, states=[6])
        service.store(b, states=[8])
        await _bring(service, a)
        async with listening(service) as listener:
            await listener.until_ready()
            assert listener.seen == ["reset", "stored", "stored", "ready"]
            assert listener.resident == {("m", "kv"): {key.hex() for key in a}, ("m", "state"): {a[5].hex()}}
            await _bring(service, b)
            await listener.until_known(b)
            service.parts.service.residency.log.check_integrity()
            await listener.until_known([a[5], b[7]], "state")
        assert service.parts.service.residency.log.listeners == 0
        await service.idle()


async def test_coming_back_goes_on_or_begins_anew(service: Live) -> None:
    a, b = make_keys(5), make_keys(5, "b")
    async with listening(service) as always:
        await always.until_ready()
        async with listening(service) as first:
            await first.until_ready()
            await _bring(service, a)
            await first.until_known(a)
        await _bring(service, b)
        async with listening(service, first.id) as second:
            second.resident = first.resident
            await second.until_known([*a, *b])
            assert set(second.seen) == {"stored"}
    async with listening(service, first.id) as third:
        await third.until_ready()
        assert third.seen[:2] == ["gap", "reset"]
        assert third.resident["m", "kv"] == {key.hex() for key in (*a, *b)}
    for foreign in ("x", "0.0.5", first.id.rpartition(".")[0] + ".99999"):
        async with listening(service, foreign) as fourth:
            assert await fourth.next() == "gap"
    await service.idle()


async def test_a_slow_listener_loses_its_place_and_no_memory(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(4000), events={"buffer": 500}) as service:
        keys = [make_keys(4000, name) for name in "ab"]
        async with listening(service) as slow:
            await slow.until_ready()
            # More than sockets buffer: 130 bytes an event, 16000 at a time.
            for _ in range(3):
                for chain in keys:
                    await _bring(service, chain)
            log = service.parts.service.residency.log
            assert len(log._ring) == 500
            while slow.resident.get(("m", "kv")) != {key.hex() for key in keys[1]}:
                await slow.next()
            assert "gap" in slow.seen
        await service.idle()


async def test_one_model_only(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(8), kv_only(8, "n")) as service:
        async with listening(service, query="?model=n") as listener:
            await listener.until_ready()
            await _bring(service, make_keys(4))
            keys = make_keys(3, "n")
            service.store(keys, model="n")
            await service.client.prefetch("n", keys, wait_ms=10_000)
            while listener.resident.get(("n", "kv")) != {key.hex() for key in keys}:
                await listener.next()
            assert set(listener.resident) == {("n", "kv")}
        unknown = await service.http.get("/v1/events?model=other")
        assert (unknown.status_code, unknown.json()["type"]) == (404, "unknown-model")
        await service.idle()


async def test_listeners_are_bounded(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(8), events={"max_listeners": 1}) as service:
        async with listening(service) as listener:
            await listener.until_ready()
            refused = await service.http.get("/v1/events")
            assert (refused.status_code, refused.json()["type"]) == (429, "too-many-listeners")
            assert int(refused.headers["Retry-After"]) > 0
        async with listening(service) as listener:
            await listener.until_ready()


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_who_leaves_is_noticed_without_an_event(service: Live, how: Leaving) -> None:
    log = service.parts.service.residency.log
    sock = await asyncio.to_thread(send_request, ("127.0.0.1", service.port), "GET", "/v1/events")
    await until(lambda: log.listeners == 1)
    leave(sock, how)
    await until(lambda: not log.listeners and not service.asked)


async def test_a_stop_ends_the_stream(service: Live) -> None:
    async with listening(service) as listener:
        await listener.until_ready()
        await service.parts.service.stop(5)
        assert await listener.next() == "end"


@pytest.mark.parametrize(("token", "status"), [("any", 200), ("token-of-a", 403), ("none", 401)])
async def test_no_tenant_may_listen(tmp_path: Path, token: str, status: int) -> None:
    tenants: dict[str, Any] = {"token": "any", "tenant_tokens": {"a": "token-of-a"}, "tenants": [{"name": "a"}]}
    async with live(tmp_path, kv_only(8), **tenants) as service:
        url, headers = f"http://127.0.0.1:{service.port}/v1/events", {"Authorization": f"Bearer {token}"}
        async with httpx2.AsyncClient(timeout=30) as http, http.stream("GET", url, headers=headers) as answer:
            assert answer.status_code == status
            if status == 403:
                await answer.aread()
                assert answer.json()["type"] == "service-token-needed"
