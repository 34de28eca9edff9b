"""What each route answers, field by field, in JSON and in MessagePack."""

import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal, cast

import pytest

from api.wire import Answer, Wire
from forestage import __version__
from support.live import PAGE_BYTES, Live, hybrid, live, make_keys, until

KEYS = make_keys(12)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Live]:
    async with live(tmp_path, hybrid(8, 2)) as running:
        running.store(KEYS, states=[3, 8, 12])
        yield running


@pytest.fixture(params=["json", "msgpack"])
def wire(service: Live, request: pytest.FixtureRequest) -> Wire:
    return Wire(service, cast('Literal["json", "msgpack"]', request.param))


def _lengths(*pages: int) -> dict[str, Any]:
    names = ("requested", "host", "stored", "restorable", "granted", "ready")
    lengths = dict(zip(names, pages, strict=True))
    return {"pages": lengths, "tokens": {name: 16 * number for name, number in lengths.items()}}


def _taken_out(answer: Answer) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Split an answer into what is the same every time, its times, and its lease with slots."""
    body = dict(answer.body)
    timing = body.pop("timing_ms")
    return body, timing, {name: body.pop(name) for name in ("lease", "slots") if name in body}


async def test_a_prefetch_that_is_cut_to_the_pool(wire: Wire) -> None:
    first = await wire.prefetch(KEYS[:3], wait_ms=5000)
    assert first.body["outcome"] == "complete"
    await wire.ask("DELETE", f"/v1/leases/{first.body['lease']['id']}")

    answer = await wire.prefetch(KEYS, request_id="r", wait_ms=5000, lease_ms=30_000)
    assert answer.status == 200
    body, timing, held = _taken_out(answer)
    assert body == {
        "request_id": "r",
        "model": "m",
        "state": "done",
        "outcome": "partial",
        "page_tokens": 16,
        **_lengths(12, 3, 12, 12, 8, 8),
        "loaded": 5,
        "joined": 0,
        "shortfall": {"host_capacity": 4},
    }
    assert set(timing) == {"queued", "probe", "load", "total"}
    assert timing["total"] == pytest.approx(timing["queued"] + timing["probe"] + timing["load"], abs=0.01)
    assert set(held["lease"]) == {"id", "expires_in_ms"}
    assert 25_000 < held["lease"]["expires_in_ms"] <= 30_000
    assert {name: len(set(slots)) for name, slots in held["slots"].items()} == {"kv": 8, "state": 1}

    for same in (await wire.ask("GET", "/v1/prefetch/r"), await wire.ask("POST", "/v1/prefetch/r/finish")):
        again, _, still_held = _taken_out(same)
        assert (same.status, again, still_held["slots"]) == (200, body, held["slots"])
    await wire.service.idle()


async def test_a_prefetch_that_finds_nothing(wire: Wire) -> None:
    answer = await wire.prefetch(make_keys(4, "unknown"), request_id="r", wait_ms=5000)
    body, _, held = _taken_out(answer)
    assert held == {}
    assert body == {
        "request_id": "r",
        "model": "m",
        "state": "done",
        "outcome": "miss",
        "page_tokens": 16,
        **_lengths(4, 0, 0, 0, 0, 0),
        "loaded": 0,
        "joined": 0,
        "shortfall": {"not_stored": 4},
    }


@pytest.mark.parametrize("device_pages", [0, 3])
async def test_a_prefetch_that_nothing_is_known_of_yet(wire: Wire, device_pages: int) -> None:
    wire.service.storage.hang_probes()
    answer = await wire.prefetch(KEYS, request_id="r", device_pages=device_pages)
    assert answer.status == 202
    body, timing, held = _taken_out(answer)
    assert held == {}
    assert body == {
        "request_id": "r",
        "model": "m",
        "state": "probing",
        "outcome": None,
        "page_tokens": 16,
        **_lengths(12, *[device_pages] * 5),
        "loaded": 0,
        "joined": 0,
        "shortfall": {},
    }
    assert timing["load"] == 0


async def test_a_prefetch_that_is_loading_shows_no_slots(wire: Wire) -> None:
    service = wire.service
    service.storage.fault(0, KEYS[2], hold=True)
    await wire.prefetch(KEYS[:8], request_id="r")
    await until(lambda: service.engine.jobs["r"].contiguous == 2)
    body, _, held = _taken_out(await wire.ask("GET", "/v1/prefetch/r"))
    assert held == {}
    assert (body["state"], body["outcome"], body["shortfall"]) == ("loading", None, {})
    assert body["pages"] == {"requested": 8, "host": 0, "stored": 8, "restorable": 8, "granted": 8, "ready": 0}
    service.storage.release()
    done = await wire.ask("GET", "/v1/prefetch/r?wait_ms=5000")
    assert (done.status, done.body["state"], done.body["pages"]["ready"]) == (200, "done", 8)


async def test_a_prefetch_of_nothing_more_than_the_gpu_has(wire: Wire) -> None:
    for keys, device_pages in ((KEYS[:5], 5), ([], 0)):
        answer = await wire.prefetch(keys, device_pages=device_pages)
        body, _, held = _taken_out(answer)
        assert (answer.status, body["state"], body["outcome"], held) == (200, "done", "complete", {})
        assert body["shortfall"] == {}
        assert set(body["pages"].values()) == {device_pages}
    assert wire.service.storage.probes == 0


async def test_keys_are_opaque_and_hex_is_folded(wire: Wire) -> None:
    upper = [key.hex().upper() for key in KEYS[:3]]
    answer = await wire.ask("POST", "/v1/prefetch", {"model": "m", "keys": upper, "wait_ms": 5000})
    assert answer.body["outcome"] == "complete"
    assert (await wire.prefetch(KEYS[:3])).body["pages"]["host"] == 3


async def test_packed_keys(service: Live) -> None:
    wire = Wire(service, "msgpack")
    packed = {"model": "m", "keys": b"".join(KEYS[:3]), "key_bytes": 32, "wait_ms": 5000}
    answer = await wire.ask("POST", "/v1/prefetch", packed)
    assert answer.body["pages"]["ready"] == 3


async def test_a_lookup(wire: Wire) -> None:
    await wire.prefetch(KEYS[:3], wait_ms=5000)
    answer = await wire.ask("POST", "/v1/lookup", {"model": "m", "keys": wire.keys([*KEYS[:10], *make_keys(1, "x")])})
    pages = {"requested": 11, "host": 3, "stored": 10, "restorable": 8, "grantable": 8}
    assert (answer.status, answer.body) == (
        200,
        {
            "model": "m",
            "page_tokens": 16,
            "pages": pages,
            "tokens": {name: 16 * p for name, p in pages.items()},
            "boundaries": [3, 8],
        },
    )


async def test_a_lease(wire: Wire) -> None:
    await wire.prefetch(KEYS[:8], wait_ms=5000)
    probes, reads = wire.service.storage.probes, sum(wire.service.storage.reads.values())
    body = {"model": "m", "keys": wire.keys(KEYS), "device_pages": 2, "lease_ms": 7000}
    answer = await wire.ask("POST", "/v1/leases", body)
    assert answer.status == 200
    slots, lease = answer.body.pop("slots"), answer.body.pop("lease")
    assert answer.body == {"model": "m", "page_tokens": 16, **_lengths(12, 8, 8, 8, 8, 8)}
    assert {name: len(set(numbers)) for name, numbers in slots.items()} == {"kv": 6, "state": 1}
    assert 6000 < lease["expires_in_ms"] <= 7000
    assert (wire.service.storage.probes, sum(wire.service.storage.reads.values())) == (probes, reads)

    renewed = await wire.ask("POST", f"/v1/leases/{lease['id']}/renew", {"lease_ms": 60_000})
    assert (renewed.status, set(renewed.body), renewed.body["lease"]["id"]) == (200, {"lease"}, lease["id"])
    assert 50_000 < renewed.body["lease"]["expires_in_ms"] <= 60_000
    for _ in range(2):
        released = await wire.ask("DELETE", f"/v1/leases/{lease['id']}")
        assert (released.status, released.body) == (204, None)
    gone = await wire.ask("POST", f"/v1/leases/{lease['id']}/renew", {"lease_ms": 1})
    assert (gone.status, gone.body["type"]) == (410, "lease-gone")


async def test_a_lease_on_nothing(wire: Wire) -> None:
    answer = await wire.ask("POST", "/v1/leases", {"model": "m", "keys": wire.keys(KEYS)})
    assert answer.body == {"model": "m", "page_tokens": 16, **_lengths(12, 0, 0, 0, 0, 0)}
    assert len(wire.service.engine.leases) == 0


async def test_the_pool_and_the_models(wire: Wire) -> None:
    pool = (await wire.ask("GET", "/v1/pool")).body
    file = wire.service.parts.pool
    assert {name: pool[name] for name in ("path", "bytes", "instance", "generation")} == {
        "path": file.path,
        "bytes": os.stat(file.path).st_size,
        "instance": file.instance,
        "generation": file.generation,
    }
    kv, state = (pool["regions"]["m"][name] for name in ("kv", "state"))
    assert set(kv) == {"offset", "slot_bytes", "slots", "shards", "shard_bytes", "bytes", "table_offset"}
    assert (kv["slots"], kv["shards"], kv["bytes"], kv["slot_bytes"]) == (8, 1, PAGE_BYTES, PAGE_BYTES)
    assert kv["offset"] + 8 * kv["slot_bytes"] <= state["offset"] or state["offset"] < kv["offset"]

    (model,) = (await wire.ask("GET", "/v1/models")).body["models"]
    fingerprint = model.pop("fingerprint")
    assert re.fullmatch("[0-9a-f]{32}", fingerprint)
    component = {"bytes": PAGE_BYTES, "shards": 1}
    assert model == {
        "name": "m",
        "page_tokens": 16,
        "shards": 1,
        "dtype": "bfloat16",
        "layout": "page_first",
        "hash": None,
        "components": [
            {"name": "kv", "covers": "every_page", "window": 0, "slots": 8, **component},
            {"name": "state", "covers": "tail", "window": 1, "slots": 2, **component},
        ],
    }


async def test_info_and_probes(wire: Wire) -> None:
    info = (await wire.ask("GET", "/v1/info")).body
    assert info.pop("uptime_s") > 0
    assert info == {
        "version": __version__,
        "storage": "file",
        "storage_state": "up",
        "pinned": "none",
        "hugepages": wire.service.parts.pool.hugepages,
        "instance": wire.service.parts.pool.instance,
        "generation": 1,
        "models": ["m"],
        "regions_uds": "",
    }
    assert (await wire.ask("GET", "/healthz")).body == {"status": "ok"}
    assert (await wire.ask("GET", "/readyz")).body == {"status": "ready", "storage": "up"}


async def test_readiness_follows_storage_pool_file_and_stopping(wire: Wire) -> None:
    service = wire.service
    service.storage.refuse_probes = True
    await wire.prefetch(KEYS, wait_ms=5000)
    assert (await wire.ask("GET", "/readyz")).body == {"status": "ready", "storage": "degraded"}
    assert (await wire.ask("GET", "/v1/info")).body["storage_state"] == "degraded"
    assert (await wire.ask("GET", "/healthz")).status == 200

    path = service.parts.pool.path
    os.rename(path, f"{path}.aside")
    gone = await wire.ask("GET", "/readyz")
    assert (gone.status, gone.body["type"], gone.body["storage"]) == (503, "pool-unlinked", "degraded")
    os.rename(f"{path}.aside", path)
    service.context.stopping = True
    stopping = await wire.ask("GET", "/readyz")
    assert (stopping.status, stopping.body["type"]) == (503, "stopping")
    assert (await wire.ask("GET", "/healthz")).status == 200
