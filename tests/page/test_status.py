"""`/v1/status` and timelines: the numbers of `/metrics`, bounded in size, and nobody else's jobs."""

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2

from forestage.core.model_pool import ModelPool
from forestage.observe.history import BUCKETS
from forestage.observe.status import MAX_CELLS, MAX_FINISHED, MAX_RUNNING, Status
from forestage.storage.base import ReadOutcome
from support.engine_driver import SlotLog
from support.live import Live, hybrid, kv_only, live, make_keys, sum_of, until

KEYS = make_keys(8)
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def _agree(status: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    """Check every number of the feed that `/metrics` has as well."""
    for part in status["pool"]:
        labels = f'model="{part["model"]}"', f'component="{part["component"]}"'
        for state, slots in part["states"].items():
            assert sum_of(metrics, "pool_slots", *labels, f'state="{state}"') == slots, (part, state)
        assert sum_of(metrics, "evicted_pages_total", *labels) == part["evicted_pages"]
        assert sum(part["states"].values()) == part["slots"]
    for state, jobs in status["jobs"].items():
        assert sum_of(metrics, "jobs", f'state="{state}"') == jobs
    totals = status["totals"]
    for name in ("requested", "ready", "loaded", "joined"):
        assert sum_of(metrics, f"{name}_pages_total") == totals[f"{name}_pages"], name
    assert totals["shortfall_pages"]
    for reason, pages in totals["shortfall_pages"].items():
        assert sum_of(metrics, "shortfall_pages_total", f'reason="{reason}"') == pages
    assert sum_of(metrics, "shortfall_pages_total") == sum(totals["shortfall_pages"].values())
    for outcome, jobs in totals["jobs"].items():
        assert sum_of(metrics, "prefetch_requests_total", f'outcome="{outcome}"') == jobs
    assert sum_of(metrics, "storage_read_bytes_total") == totals["read_bytes"]
    assert sum_of(metrics, "storage_errors_total") == sum(totals["errors"].values())
    assert sum_of(metrics, "storage_up") == (status["storage"]["state"] == "up")
    for name in ("inflight_bytes", "leases", "pins"):
        assert sum_of(metrics, name) == status[name], name
    for name in ("requested_pages", "ready_pages", "read_bytes", "jobs"):
        assert sum(bucket[name] for bucket in status["recent"]["buckets"]) == (
            sum(totals["jobs"].values()) if name == "jobs" else totals[name]
        )


def _map_agrees(part: Mapping[str, Any]) -> bool:
    """Say whether the cells add up to the states; they may be a quarter of a second older."""
    assert part["map"]["exact"]
    by_state = [sum(cell[i] for cell in part["map"]["cells"]) for i in range(5)]
    return bool(dict(zip(part["map"]["states"], by_state, strict=True)) == part["states"])


async def _maps_agree(service: Live) -> None:
    async with asyncio.timeout(10):
        while True:
            if all(_map_agrees(part) for part in (await _status(service))["pool"]):
                return
            await asyncio.sleep(0.01)


async def _status(service: Live) -> dict[str, Any]:
    answer = await service.http.get("/v1/status")
    assert answer.status_code == 200
    parsed: dict[str, Any] = answer.json()
    return parsed


async def test_the_numbers_are_those_of_metrics(tmp_path: Path) -> None:
    async with live(tmp_path, hybrid(32, 6)) as service:
        service.store(KEYS, states=[4, 8])
        client, storage = service.client, service.storage
        bad = make_keys(8, "bad")
        service.store(bad, states=[4, 8])
        storage.fault(0, bad[5], outcome=ReadOutcome.CORRUPT)
        await client.prefetch("m", bad, wait_ms=5000)
        await client.prefetch("m", make_keys(40, "absent"), wait_ms=5000)
        storage.fault()
        storage.fault(0, KEYS[6], hold=True)
        await client.prefetch("m", KEYS, request_id="slow", deadline_ms=60_000)
        await until(lambda: service.engine.jobs["slow"].contiguous == 6)
        status, metrics = await _status(service), await service.scrape()
        _agree(status, metrics)
        await _maps_agree(service)
        assert status["jobs"] == {"queued": 0, "probing": 0, "loading": 1}
        (job,) = status["running"]
        assert (job["request_id"], job["contiguous"], job["pages"]["granted"]) == ("slow", 6, 8)
        assert 0 < job["deadline_in_ms"] < 60_000
        assert [done["outcome"] for done in status["finished"]] == ["miss", "partial"]
        storage.release()
        await client.wait("slow", 5)
        await service.quiet()
        _agree(await _status(service), await service.scrape())
        await _maps_agree(service)
        service.parts.history.check_integrity()


async def test_it_is_bounded_whatever_runs(tmp_path: Path) -> None:
    models = [kv_only(200, f"m{i}") for i in range(8)]
    async with live(tmp_path, *models) as service:
        service.storage.fault(hold=True)
        for i in range(3 * MAX_RUNNING):
            keys = make_keys(2, f"chain {i}")
            service.store(keys, model="m0")
            await service.client.prefetch("m0", keys, request_id=f"r{i}")
        for i in range(2 * MAX_FINISHED):
            await service.client.prefetch("m1", make_keys(1, f"none {i}"), wait_ms=5000)
        status = await _status(service)
        assert len(status["running"]) == MAX_RUNNING
        assert status["running_not_shown"] == 2 * MAX_RUNNING
        assert len(status["finished"]) == MAX_FINISHED
        assert len(status["recent"]["buckets"]) == BUCKETS
        assert sum(len(part["map"]["cells"]) for part in status["pool"]) <= MAX_CELLS
        assert len(json.dumps(status)) < 100_000
        service.storage.release()
        await service.idle()


async def test_a_large_pool_costs_no_more(tmp_path: Path) -> None:
    """A million slots, some thousands of them dirty: drawing must not hold up the loop."""
    async with live(tmp_path, kv_only(64)) as service:
        layout = service.engine.pools["m"].layout
        pool = ModelPool(layout, [1 << 20], [SlotLog(1 << 20)])
        pool.adopt(0, [(slot, b"%032d" % slot) for slot in range(1 << 19)])
        pool.adopt_dirty(0, range(4096))
        service.engine.pools["m"], kept = pool, service.engine.pools["m"]  # type: ignore[index]
        best = float("inf")
        for _ in range(5):
            began = time.perf_counter()
            described = Status(service.engine, service.parts.history).describe(None)
            best = min(best, time.perf_counter() - began)
        service.engine.pools["m"] = kept  # type: ignore[index]
        (part,) = described["pool"]
        assert part["states"] == {
            "free": 1 << 19,
            "resident": (1 << 19) - 4096,
            "leased": 0,
            "loading": 0,
            "dirty": 4096,
        }
        assert len(part["map"]["cells"]) == MAX_CELLS
        assert not part["map"]["exact"]
        assert best < 0.05


async def test_a_tenant_sees_its_own_jobs_only(tmp_path: Path) -> None:
    tenants = [{"name": "a", "min_share": 0.5}, {"name": "b", "min_share": 0.5}]
    tokens = {"a": "secret-a", "b": "secret-b"}
    async with live(tmp_path, kv_only(64), token="all", tenant_tokens=tokens, tenants=tenants) as service:
        service.store(KEYS)
        service.storage.fault(0, KEYS[3], hold=True)
        bodies = {"a": KEYS, "b": make_keys(3, "none")}
        for tenant, keys in bodies.items():
            body = {"model": "m", "keys": [key.hex() for key in keys], "request_id": f"of-{tenant}"}
            header = {"Authorization": f"Bearer {tokens[tenant]}"}
            assert (await service.http.post("/v1/prefetch", json=body, headers=header)).status_code in (200, 202)
        await until(lambda: service.engine.jobs["of-b"].done)
        seen = {}
        for name, token in {**tokens, "all": "all"}.items():
            header = {"Authorization": f"Bearer {token}"}
            status = (await service.http.get("/v1/status", headers=header)).json()
            seen[name] = {job["request_id"] for job in (*status["running"], *status["finished"])}
            timelines = [
                (await service.http.get(f"/v1/prefetch/of-{tenant}/timeline", headers=header)).status_code
                for tenant in tokens
            ]
            assert timelines == {"a": [200, 404], "b": [404, 200], "all": [200, 200]}[name]
        assert seen == {"a": {"of-a"}, "b": {"of-b"}, "all": {"of-a", "of-b"}}
        service.storage.release()


async def test_a_timeline(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(64)) as service:
        service.store(KEYS[:6])
        service.storage.fault(0, KEYS[4], outcome=ReadOutcome.MISSING)
        body = {"model": "m", "keys": [key.hex() for key in KEYS], "request_id": "r", "wait_ms": 5000}
        header = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        await service.http.post("/v1/prefetch", json=body, headers=header)
        answer: httpx2.Response = await service.http.get("/v1/prefetch/r/timeline")
        told = answer.json()
        assert (told["state"], told["outcome"], told["trace_id"], told["cuts"]) == ("done", "partial", TRACE, 1)
        events = [moment["event"] for moment in told["moments"]]
        assert events[:4] == ["arrived", "admitted", "probe", "grant"]
        assert events[-1] == "done"
        assert next(m for m in told["moments"] if m["event"] == "cut")["reason"] == "vanished"
        times = [moment["at_ms"] for moment in told["moments"]]
        assert times == sorted(times)
        assert times[0] == 0
        missing = await service.http.get("/v1/prefetch/unknown/timeline")
        assert (missing.status_code, missing.json()["type"]) == (404, "unknown-job")
        await service.idle()
