"""Thousands of prefetches that begin and end at random moments leave nothing behind."""

import asyncio
import gc
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.dawdling import Dawdling
from forestage.core.audit import check_integrity
from forestage.core.job import Job, PrefetchRequest
from support.live import Live, hybrid, kv_only, live, make_keys, sum_of, until

CYCLES = 10_000
AT_ONCE = 25


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class _Cycles:
    """Takes turns with one service; `prefixes` share their heads."""

    def __init__(self, service: Live, randomness: random.Random) -> None:
        self.service = service
        self.randomness = randomness
        self.prefixes = [make_keys(8, f"trunk {i % 5}")[:4] + make_keys(8, f"branch {i}")[4:] for i in range(20)]
        for keys in self.prefixes:
            service.store(keys, states=[4, 8])
        self.ends: dict[str, int] = {}
        self.turn = 0

    async def run(self, cycles: int) -> None:
        async def take_turns() -> None:
            while self.turn < cycles:
                self.turn += 1
                await self._cycle(f"r{self.turn}")

        await asyncio.gather(*(take_turns() for _ in range(AT_ONCE)))

    async def _cycle(self, request_id: str) -> None:
        randomness, door = self.randomness, self.service.parts.service
        keys = randomness.choice(self.prefixes)[: randomness.randint(1, 8)]
        how = randomness.choice(["delete", "delete", "finish", "deadline", "gone", "wait", "wait"])
        deadline_ms = randomness.choice([1, 2, 5]) if how == "deadline" else 0
        request = PrefetchRequest(
            request_id,
            "m",
            tuple(keys),
            device_pages=randomness.choice([0, 0, 0, len(keys) // 2]),
            priority=randomness.choice([0, 0, 1]),
            deadline_ms=deadline_ms,
            lease_ms=randomness.choice([1, 60_000]),
        )
        job, _ = door.submit(request)
        if how != "wait" and randomness.random() < 0.8:
            await asyncio.sleep(randomness.choice([0, 0, 0.0005, 0.002]))
        if how == "delete":
            door.forget(request_id)
        elif how == "finish":
            door.finish(job)
        elif how == "gone":
            door.cancel(job)
        await door.wait(job)
        self._look(job, keys)
        if randomness.random() < 0.5:
            await asyncio.sleep(0)
        door.forget(request_id)

    def _look(self, job: Job, keys: list[bytes]) -> None:
        assert job.outcome is not None
        self.ends[job.outcome.value] = self.ends.get(job.outcome.value, 0) + 1
        job.check_integrity()
        lease = job.lease
        if lease is None or not lease.alive:
            return
        first = job.request.device_pages
        index = self.service.engine.pools["m"].index[0]
        assert [index.key_of(slot) for slot in lease.slots[0]] == keys[first : job.ready]


@pytest.mark.timeout(150)
async def test_ten_thousand_cycles(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    storage = Dawdling(1, longest_s=0.001, loose=0.02)
    settings = {"max_inflight_fraction": 0.5, "settle_ms": 2, "keep_done_ms": 1000}
    async with live(tmp_path, hybrid(24, 4), prefetch=settings, inner=storage) as service:
        service.memory = storage
        cycles = _Cycles(service, random.Random(10))
        await cycles.run(CYCLES // 5)
        await service.idle()
        gc.collect()
        before = (_rss_bytes(), threading.active_count(), _num_descriptors(), len(asyncio.all_tasks()))
        await cycles.run(CYCLES)
        await service.idle()
        check_integrity(service.engine)
        gc.collect()
        after = (_rss_bytes(), threading.active_count(), _num_descriptors(), len(asyncio.all_tasks()))
        figures = {"before": before, "after": after, "ends": cycles.ends}
        record_property("figures", str(figures))
        print(figures)
        assert after[1:] == before[1:]
        assert after[0] - before[0] < 8 << 20
        assert len(service.engine.jobs) == 0
        assert not service.parts.service._waiting
        assert not service.parts.service._probing
        assert set(cycles.ends) == {"complete", "partial", "miss", "cancelled"}
        samples = await service.scrape()
        assert sum_of(samples, "prefetch_requests_total") == CYCLES
        storage.loose = 0
        whole = make_keys(24, "whole")
        service.store(whole, states=[24])
        job = await service.client.prefetch("m", whole, wait_ms=20_000)
        assert (job.outcome, job.pages.ready) == ("complete", 24)
        await service.idle()


async def test_eight_identical_prefetches_read_each_page_once(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(16)) as service:
        for turn in range(20):
            keys = make_keys(8, f"turn {turn}")
            service.store(keys)
            service.storage.fault(delay_s=0.0005)
            asked = [service.client.prefetch("m", keys, request_id=f"r{i}", wait_ms=20_000) for i in range(8)]
            jobs = await asyncio.gather(*asked)
            assert {job.outcome for job in jobs} == {"complete"}
            assert {job.slots["kv"] for job in jobs} == {jobs[0].slots["kv"]}
            assert sum(job.loaded for job in jobs) == 8
            assert all(job.loaded + job.joined + job.pages.host == 8 for job in jobs)
            for i in range(8):
                await service.client.cancel(f"r{i}")
        assert set(service.storage.reads.values()) == {1}
        await service.idle()


@pytest.mark.parametrize("how", ["delete", "finish", "gone"])
async def test_the_first_of_eight_is_ended_midway(tmp_path: Path, how: str) -> None:
    async with live(tmp_path, hybrid(16, 2)) as service:
        keys = make_keys(8)
        service.store(keys, states=[8])
        service.storage.fault(0, keys[4], hold=True)
        for i in range(8):
            await service.client.prefetch("m", keys, request_id=f"r{i}")
        await until(lambda: all(service.engine.jobs[f"r{i}"].contiguous == 4 for i in range(8)))
        door = service.parts.service
        if how == "delete":
            await service.client.cancel("r0")
        elif how == "finish":
            assert (await service.client.finish("r0")).pages.ready == 0  # no state there
        else:
            door.cancel(door.find("r0"))
        service.storage.release()
        others = [await service.client.wait(f"r{i}", 5) for i in range(1, 8)]
        assert {(job.outcome, job.pages.ready) for job in others} == {("complete", 8)}
        assert set(service.storage.reads.values()) == {1}
        await service.idle()


async def test_small_jobs_do_not_wait_behind_a_large_one(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(600), prefetch={"max_inflight_fraction": 1.0}) as service:
        large = make_keys(400, "large")
        service.store(large)
        service.storage.fault(delay_s=0.002)
        alone = make_keys(2, "alone")
        service.store(alone)
        solo = await service.client.prefetch("m", alone, wait_ms=20_000)
        await service.client.prefetch("m", large, request_id="large")
        for i in range(10):
            small = make_keys(2, f"small {i}")
            service.store(small)
            job = await service.client.prefetch("m", small, wait_ms=20_000)
            assert job.outcome == "complete"
            assert job.timing_ms["total"] < 4 * solo.timing_ms["total"] + 250
        assert not (await service.client.get_prefetch("large")).done
        assert (await service.client.wait("large", 20)).outcome == "complete"
        await service.idle()
