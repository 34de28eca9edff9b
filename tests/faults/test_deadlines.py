"""One deadline over everything: whatever hangs, the answer comes in time with what is ready (FAULTS S4)."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from faults.stored_pages import StoredPages
from forestage_client import Client, Prefetch
from support.live import Live, hybrid, kv_only, live, make_keys, until

DEADLINE_MS = 300
LATE_S = 1.5  # a machine that others use as well
KEYS = make_keys(8)


@dataclass(frozen=True)
class Case:
    """What hangs, and what is ready all the same."""

    name: str
    hang: Callable[[Live], None]
    ready: int
    host: int = 0


def _slow(service: Live) -> None:
    service.storage.fault(delay_s=0.06)


CASES = [
    Case("page 5 never answers", lambda s: s.storage.fault(0, KEYS[5], hold=True), 5),
    Case("the first page never answers", lambda s: s.storage.fault(0, KEYS[0], hold=True), 0),
    Case("the last page never answers", lambda s: s.storage.fault(0, KEYS[7], hold=True), 7),
    Case("a page stops in its middle", lambda s: s.storage.fault(0, KEYS[5], withheld_bytes=1000), 5),
    Case("a page stops before its last byte", lambda s: s.storage.fault(0, KEYS[5], withheld_bytes=1), 5),
    Case("the probe never answers", lambda s: s.storage.hang_probes(), 0),
    Case("the probe never answers, head resident", lambda s: s.storage.hang_probes(), 3, host=3),
    Case("no read can begin", lambda s: setattr(s.parts.storage, "batches_in_flight", 0), 0),
]


async def _ask(service: Live, request_id: str = "r") -> tuple[Prefetch, float]:
    began = time.monotonic()
    job = await service.client.prefetch("m", KEYS, request_id=request_id, deadline_ms=DEADLINE_MS, wait_ms=20_000)
    return job, time.monotonic() - began


def _in_time(seconds: float) -> bool:
    return DEADLINE_MS / 1e3 - 0.01 <= seconds <= DEADLINE_MS / 1e3 + LATE_S


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
async def test_what_hangs(tmp_path: Path, case: Case) -> None:
    async with live(tmp_path, kv_only(16), storage={"stall_timeout_ms": 60_000, "probe_timeout_ms": 60_000}) as service:
        service.store(KEYS)
        if case.host:
            await service.client.prefetch("m", KEYS[: case.host], wait_ms=5000)
        case.hang(service)
        job, seconds = await _ask(service)
        assert _in_time(seconds)
        assert (job.state, job.pages.ready, dict(job.shortfall)) == ("done", case.ready, {"deadline": 8 - case.ready})
        assert job.outcome == ("partial" if case.ready else "miss")
        assert len(job.slots.get("kv", ())) == case.ready
        assert service.sweep() == case.ready  # they are readable now, whatever still hangs
        service.parts.storage.batches_in_flight = 4
        service.storage.release()
        await service.idle()


async def test_every_page_is_slow(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(16)) as service:
        service.store(KEYS)
        _slow(service)
        job, seconds = await _ask(service)
        assert _in_time(seconds)
        assert 1 <= job.pages.ready <= 5
        assert dict(job.shortfall) == {"deadline": 8 - job.pages.ready}
        assert service.sweep() == job.pages.ready
        await service.idle()


async def test_the_state_hangs_after_all_pages(tmp_path: Path) -> None:
    async with live(tmp_path, hybrid(16, 4), prefetch={"settle_ms": 100}) as service:
        service.store(KEYS, states=[4, 8])
        service.storage.fault(1, KEYS[7], hold=True)
        job, seconds = await _ask(service)
        assert _in_time(seconds)
        assert (job.pages.granted, job.pages.ready, dict(job.shortfall)) == (8, 4, {"deadline": 4})
        assert {name: len(slots) for name, slots in job.slots.items()} == {"kv": 4, "state": 1}
        service.storage.release()
        await service.idle()


async def test_all_states_hang(tmp_path: Path) -> None:
    async with live(tmp_path, hybrid(16, 4), prefetch={"settle_ms": 100}) as service:
        service.store(KEYS, states=[4, 8])
        service.storage.fault(1, hold=True)
        job, seconds = await _ask(service)
        assert _in_time(seconds)
        assert (job.pages.ready, dict(job.shortfall)) == (0, {"deadline": 8})
        service.storage.release()
        await service.idle()


async def test_other_jobs_hold_every_read(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(64), storage={"stall_timeout_ms": 60_000}) as service:
        service.store(KEYS)
        service.storage.fault(hold=True)
        for i in range(5):
            others = make_keys(4, f"other {i}")
            service.store(others)
            await service.client.prefetch("m", others, request_id=f"other-{i}")
            await until(lambda i=i: service.storage.open_reads == min(i + 1, 4))  # type: ignore[misc]
        job, seconds = await _ask(service)
        assert _in_time(seconds)
        assert dict(job.shortfall) == {"deadline": 8}
        service.storage.release()
        await service.idle()


async def test_deadlines_need_no_waiting_caller_and_no_other_traffic(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(64)) as service:
        service.store(KEYS)
        service.storage.fault(0, KEYS[5], hold=True)
        await service.client.prefetch("m", KEYS, request_id="r", deadline_ms=100)
        await asyncio.sleep(0.4)
        job = service.engine.jobs["r"]
        assert job.done
        assert job.timing.done is not None
        assert 0.09 <= job.timing.done - job.timing.arrived <= 0.4
        service.storage.release()
        await service.idle()


async def test_reads_that_hang_do_not_keep_other_files_from_being_read(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(64), storage={"stall_timeout_ms": 100}) as service:
        hung = [make_keys(2, f"hung {i}") for i in range(4)]
        for keys in [*hung, KEYS]:
            service.store(keys)
        for keys in hung:
            service.storage.fault(0, keys[0], hold=True)
        for i, keys in enumerate(hung):
            await service.client.prefetch("m", keys, request_id=f"hung-{i}")
            await until(lambda i=i: service.storage.open_reads == i + 1)  # type: ignore[misc]
        for i in range(4):
            stalled = await service.client.wait(f"hung-{i}", 5)
            assert (stalled.outcome, dict(stalled.shortfall)) == ("miss", {"storage_error": 2})
        assert service.storage.open_reads == 4  # as many as the storage takes at once, and they do not end
        service.parts.storage._breaker.succeed()
        job = await service.client.prefetch("m", KEYS, wait_ms=5000)
        assert job.outcome == "complete"
        service.storage.release()
        await service.idle()


def test_a_file_whose_read_hangs(tmp_path: Path) -> None:
    pages = StoredPages.make(tmp_path, storage="stall_timeout_ms = 60000")
    pages.store(KEYS)
    lost = make_keys(8, "lost")
    pages.store(lost)
    pages.hang(KEYS[5:6])
    pages.hang(lost[2:3], "lost")
    with pages.serving() as service, Client(service.url, timeout_s=20) as client:
        began = time.monotonic()
        job = client.prefetch("m", KEYS, request_id="r", deadline_ms=500, wait_ms=20_000)
        assert 0.49 <= time.monotonic() - began <= 0.5 + LATE_S
        assert (job.pages.ready, dict(job.shortfall)) == (5, {"deadline": 3})
        pages.check_slots(tmp_path / "pool", KEYS[:5], job.slots["kv"])
        began = time.monotonic()
        job = client.prefetch("m", lost, deadline_ms=500, wait_ms=20_000)
        assert 0.49 <= time.monotonic() - began <= 0.5 + LATE_S
        assert (job.pages.ready, dict(job.shortfall)) == (0, {"deadline": 8})
        pages.release()
        assert client.prefetch("m", KEYS, wait_ms=20_000).outcome == "complete"
        assert client.prefetch("m", lost, wait_ms=20_000).outcome == "complete"
        assert service.stop() == 0
