"""What `/metrics` says: it conserves, moves, never grows series, and is what Prometheus takes (FAULTS S14, S16)."""

import asyncio
import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from forestage.core.job import Outcome, Reason
from forestage.storage.base import ReadOutcome
from support.live import Live, hybrid, kv_only, live, make_keys, sum_of, until
from support.redis_process import give_up

KEYS = make_keys(8)

#: Every series of the contract that this version has, as families with their labels.
DOCUMENTED = {
    "prefetch_requests_total": {"model", "outcome"},
    "requested_pages_total": {"model"},
    "ready_pages_total": {"model"},
    "shortfall_pages_total": {"model", "reason"},
    "host_pages_total": {"model"},
    "loaded_pages_total": {"model"},
    "joined_pages_total": {"model"},
    "prefetch_seconds_count": set(),
    "probe_seconds_count": set(),
    "jobs": {"state"},
    "inflight_bytes": set(),
    "pool_slots": {"model", "component", "state"},
    "evicted_pages_total": {"model", "component"},
    "leases": set(),
    "lease_expired_total": set(),
    "prefetched_pages_fate_total": {"fate"},
    "storage_read_bytes_total": {"backend"},
    "storage_read_seconds_count": {"backend"},
    "storage_errors_total": {"backend", "kind"},
    "storage_up": {"backend"},
    "pool_info": {"path", "pinned", "generation"},
    "build_info": {"version"},
}
#: Those that the contract does not name; tests/api/test_event_metrics.py moves them.
FURTHER = {
    "hint_actions_total": {"action", "outcome"},
    "event_listeners": {"channel"},
    "events_published_total": {"channel"},
    "events_dropped_total": {"channel"},
}


def _labels(series: str) -> set[str]:
    _, _, inside = series.partition("{")
    return {part.partition("=")[0] for part in inside.rstrip("}").split(",") if part}


async def _stir(service: Live) -> None:
    """Make everything happen that a service counts."""
    client, storage = service.client, service.storage
    service.store(KEYS, states=[4, 8])
    storage.fault(0, KEYS[6], hold=True)
    leader = await client.prefetch("m", KEYS, request_id="leader")
    follower = await client.prefetch("m", KEYS, request_id="follower")
    await until(lambda: service.engine.jobs["leader"].contiguous == 6)
    await service.scrape()
    storage.release()
    for job in (leader, follower):
        assert (await client.wait(job.request_id, 5)).outcome == "complete"
    await client.prefetch("m", KEYS, request_id="again", lease_ms=20, wait_ms=5000)  # host; its lease expires
    await until(lambda: service.engine.leases.expired == 1)
    for request_id in ("leader", "follower"):
        await client.cancel(request_id)
    for outcome in (ReadOutcome.MISSING, ReadOutcome.CORRUPT, ReadOutcome.ERROR):
        keys = make_keys(8, outcome)
        service.store(keys, states=[4, 8])
        storage.fault(0, keys[5], outcome=outcome)
        await client.prefetch("m", keys, wait_ms=5000, request_id=outcome)
        await client.cancel(outcome)
    storage.fault()
    stops = make_keys(8, "stops")
    service.store(stops, states=[8])
    storage.fault(hold=True)
    await client.prefetch("m", stops, deadline_ms=30, wait_ms=5000)
    await client.prefetch("m", stops, request_id="finished")
    await client.finish("finished")
    await client.prefetch("m", stops, request_id="deleted")
    await client.cancel("deleted")
    storage.release()
    storage.fault()
    await service.quiet()
    await client.prefetch("m", make_keys(3, "absent"), wait_ms=5000)
    await client.prefetch("m", make_keys(3, "stops2") + stops, wait_ms=5000)
    await client.prefetch("m", [*stops, *make_keys(1, "x")], min_pages=50, wait_ms=5000)
    many = make_keys(40, "many")
    service.store(many, states=[4, 30, 40])
    await client.prefetch("m", many, request_id="many", wait_ms=5000)  # more than the pool holds
    await client.cancel("many")
    await client.prefetch("m", make_keys(6, "many"), wait_ms=5000)  # no state there
    storage.refuse_probes = True
    await client.prefetch("m", make_keys(2, "unasked"), wait_ms=5000)
    storage.refuse_probes = False


async def test_every_documented_series_moves_and_conserves(tmp_path: Path) -> None:
    async with live(tmp_path, hybrid(32, 6), prefetch={"settle_ms": 500}) as service:
        still = await service.scrape()
        families = DOCUMENTED | FURTHER
        assert {series.partition("{")[0].removeprefix("forestage_") for series in still} >= set(families)
        for series in still:
            family = series.partition("{")[0].removeprefix("forestage_")
            if family in families:
                assert _labels(series) == families[family], series
        await _stir(service)
        moved = await service.quiet()
        assert set(moved) == set(still)  # nothing comes into being only when it happens
        for family in DOCUMENTED:
            if family.endswith(("_total", "_count")):
                assert sum_of(moved, family) > 0, family
        reasons = {reason for reason in Reason if sum_of(moved, "shortfall_pages_total", f'reason="{reason}"') > 0}
        assert reasons == set(Reason) - {Reason.SHUTDOWN}
        for outcome in Outcome:
            assert sum_of(moved, "prefetch_requests_total", f'outcome="{outcome}"') > 0, outcome
        for fate in ("used", "unused"):
            assert sum_of(moved, "prefetched_pages_fate_total", f'fate="{fate}"') > 0
        counted = sum_of(moved, "prefetch_requests_total")
        assert sum_of(moved, "prefetch_seconds_count") == counted
        assert sum_of(moved, "storage_read_bytes_total") >= 4096 * sum_of(moved, "loaded_pages_total")
        await service.idle()


async def test_gauges_while_things_are_under_way(service: Live) -> None:
    service.store(KEYS)
    service.storage.fault(0, KEYS[3], hold=True)
    await service.client.prefetch("m", KEYS, request_id="r")
    await until(lambda: service.engine.jobs["r"].contiguous == 3)
    under_way = await service.scrape()
    assert sum_of(under_way, "jobs", 'state="loading"') == 1
    assert sum_of(under_way, "inflight_bytes") == 8 * 4096
    assert sum_of(under_way, "pool_slots", 'state="loading"') == 5
    assert sum_of(under_way, "pool_slots", 'state="leased"') == 3
    service.storage.release()
    await service.client.wait("r", 5)
    done = await service.quiet()
    assert (sum_of(done, "leases"), sum_of(done, "pool_slots", 'state="leased"')) == (1, 8)
    await service.idle()


async def test_random_requests_add_no_series(service: Live) -> None:
    async def disturb(seed: int) -> None:
        secret = hashlib.sha256(f"secret {seed}".encode()).hexdigest()
        keys = [hashlib.sha256(f"{seed} {i}".encode()).hexdigest() for i in range(160)]
        body = {"model": "m", "keys": keys, "request_id": secret, "tenant": secret, "wait_ms": 2000}
        for name, path, content in (
            ("POST", "/v1/prefetch", body),
            ("POST", "/v1/prefetch", {**body, "model": secret}),
            ("POST", "/v1/lookup", {"model": "m", "keys": keys, secret: 1}),
            ("POST", f"/v1/leases/{secret}/renew", {"lease_ms": 1}),
            ("GET", f"/v1/prefetch/{secret}?x={secret}", None),
            ("GET", f"/{secret}/{seed}", None),
            (f"X{secret}"[:20].upper(), f"/metrics/{secret}", None),
            ("DELETE", f"/v1/prefetch/{secret}", None),
        ):
            await http.request(name, path, json=content)

    http = service.http
    await disturb(0)
    before = await service.scrape()
    size = len((await http.get("/metrics")).content)
    for first in range(1, 65, 8):
        await asyncio.gather(*(disturb(seed) for seed in range(first, first + 8)))
    text = (await http.get("/metrics")).text
    assert set(await service.scrape()) == set(before)
    assert len(text) < size * 1.1
    for seed in range(65):
        assert hashlib.sha256(f"secret {seed}".encode()).hexdigest() not in text
    await service.idle()


async def test_what_prometheus_takes(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        give_up("promtool is not installed: apt-get install prometheus")
    async with live(tmp_path, hybrid(32, 6), prefetch={"settle_ms": 500}) as service:
        await _stir(service)
        plain = await service.http.get("/metrics")
        assert plain.headers["content-type"].startswith("text/plain; version=")
        checked = await asyncio.to_thread(
            subprocess.run, [promtool, "check", "metrics"], input=plain.content, capture_output=True, check=False
        )
        assert (checked.returncode, checked.stderr, checked.stdout) == (0, b"", b"")
        openmetrics = await service.http.get("/metrics", headers={"Accept": "application/openmetrics-text"})
        assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
        assert openmetrics.text.endswith("# EOF\n")


async def test_a_wall_clock_that_jumps_moves_nothing(service: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    service.store(KEYS)
    job = await service.client.prefetch("m", KEYS, request_id="r", lease_ms=60_000, wait_ms=5000)
    for seconds in (-1e6, 1e9):
        monkeypatch.setattr("time.time", lambda seconds=seconds: seconds)
        await service.scrape()
        assert (await service.client.get_prefetch("r")).lease is not None
    assert job.timing_ms["total"] < 5000


async def test_models_are_counted_apart(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(16), kv_only(16, "other")) as service:
        service.store(KEYS[:4])
        service.store(KEYS, model="other")
        for model in ("m", "other"):
            await service.client.prefetch(model, KEYS, wait_ms=5000)
        samples = await service.quiet()
        assert sum_of(samples, "ready_pages_total", 'model="m"') == 4
        assert sum_of(samples, "ready_pages_total", 'model="other"') == 8
        assert sum_of(samples, "pool_slots", 'model="other"', 'state="leased"') == 8
        await service.idle()
