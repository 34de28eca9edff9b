"""Dirty pages on their way to L3: reads go first, what hangs or fails holds nothing up, and nothing gets lost."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from forestage.core.audit import check_integrity
from forestage.core.errors import StorageUnavailableError
from forestage.core.write import WriteSettings
from forestage.prefetch.service import PrefetchService
from support.live import Live, kv_only, live, make_keys, until
from writes.slow_writes import SlowWrites, fill, kv_of, settled, written

KEYS = make_keys(8)


@asynccontextmanager
async def _live(
    folder: Path, slots: int = 64, *, quick: bool = True, attempt_s: float | None = None, **writes: float
) -> AsyncIterator[tuple[Live, SlowWrites]]:
    storage = SlowWrites()
    sections = {"max_dirty_fraction": 1.0, **writes}
    async with live(folder, kv_only(slots), inner=storage, writes=sections) as service:
        if quick:
            settings = service.engine.writes.settings
            service.engine.writes.settings = WriteSettings(
                settings.max_dirty_fraction,
                settings.expire_s,
                0.05,
                settings.keep_done_s,
                settings.max_attempts,
                0.01,
                1.0,
            )
        if attempt_s is not None:
            service.parts.service._writes._attempt_s = attempt_s
        try:
            yield service, storage
        finally:
            storage.release()


def _prefetches(service: Live) -> PrefetchService:
    return service.parts.service


async def test_what_is_committed_comes_to_l3(tmp_path: Path) -> None:
    async with _live(tmp_path) as (service, storage):
        write = await written(service, KEYS)
        await _prefetches(service).wait_for_write(write)
        assert (write.committed, write.durable) == (8, 8)
        assert kv_of(service, storage, KEYS) == KEYS
        assert storage.begun == [(0, key) for key in KEYS]
        assert storage.most_at_once == 1
        await service.idle()


async def test_a_write_goes_on_beside_reads(tmp_path: Path) -> None:
    async with _live(tmp_path) as (service, storage):
        other = make_keys(4, "other")
        layout = service.engine.pools["m"].layout
        for key in other:
            storage.put(layout, 0, key, [service.expected(key, "kv")])
        service.storage.fault(0, other[0], hold=True)
        job = await service.client.prefetch("m", other)
        await until(lambda: service.storage.open_reads == 1)
        write = await written(service, KEYS)
        await settled(write)  # it does not wait for the end of all reads
        assert storage.most_at_once == 1
        service.storage.release()
        await service.http.get(f"/v1/prefetch/{job.request_id}?wait_ms=10000")
        await settled(await written(service, make_keys(8, "more")))
        assert storage.most_at_once == 1


async def test_reads_have_l3_to_themselves_between_writes(tmp_path: Path) -> None:
    async with _live(tmp_path) as (service, storage):
        other = make_keys(1, "other")
        storage.put(service.engine.pools["m"].layout, 0, other[0], [service.expected(other[0], "kv")])
        storage.seconds = 0.02
        service.storage.fault(0, other[0], hold=True)
        job = await service.client.prefetch("m", other)
        await until(lambda: service.storage.open_reads == 1)
        write = await written(service, KEYS)
        await settled(write)
        ended, took = 0.0, 0.0
        for begin, end in storage.times:
            assert begin - ended >= took * 0.9
            ended, took = end, end - begin
        # With the last read the rest is over, however long it would have been.
        _prefetches(service)._writes._rest_until = time.monotonic() + 1000
        more = await written(service, make_keys(8, "more"))
        assert len(storage.begun) == 8
        service.storage.release()
        await service.http.get(f"/v1/prefetch/{job.request_id}?wait_ms=10000")
        await settled(more)
        assert more.durable == 8


async def test_l3_is_down_and_comes_back(tmp_path: Path) -> None:
    async with _live(tmp_path, max_attempts=1000) as (service, storage):
        storage.error = StorageUnavailableError("told to")
        write = await written(service, KEYS)
        await until(lambda: len(storage.begun) > 20)
        assert (write.durable, write.failed) == (0, 0)
        assert service.engine.pools["m"].dirty(0) == 8
        job = await service.client.prefetch("m", KEYS, wait_ms=5000)
        assert (job.pages.host, job.pages.ready) == (8, 8)
        storage.error = None
        await settled(write)
        assert write.durable == 8
        assert kv_of(service, storage, KEYS) == KEYS
        await service.idle()


@pytest.mark.parametrize("error", [StorageUnavailableError("down"), OSError("full"), RuntimeError("a defect")])
async def test_attempts_are_bounded(tmp_path: Path, error: Exception) -> None:
    async with _live(tmp_path, max_attempts=3) as (service, storage):
        storage.error = error
        write = await written(service, KEYS[:4])
        await settled(write)
        assert (write.durable, write.failed) == (0, 4)
        assert len(storage.begun) == 12
        samples = await service.quiet()
        assert samples['forestage_writes_pages_total{result="lost"}'] == 4
        assert service.taken == 0  # they may be evicted, and are there until then
        assert (await service.client.lookup("m", KEYS[:4])).pages.host == 4


async def test_a_hanging_write_keeps_its_slot_until_it_has_ended(tmp_path: Path) -> None:
    async with _live(tmp_path, attempt_s=0.05, max_attempts=2) as (service, storage):
        storage.hold(stubborn=True, only=KEYS[0])
        write = await written(service, KEYS)
        await until(lambda: write.durable == 7)
        slot = service.engine.pools["m"].index[0].find(KEYS[0])
        await until(lambda: len(_prefetches(service)._writes._late) == 1)
        assert storage.begun.count((0, KEYS[0])) == 1
        assert service.engine.pools["m"].index[0].is_held(slot)
        more = await written(service, make_keys(8, "more"))
        await settled(more)
        assert (more.durable, write.settled) == (8, False)
        assert storage.most_at_once == 2  # one beside the one that hangs
        storage.release()
        await settled(write)
        assert (write.durable, write.failed) == (8, 0)
        await service.idle()


async def test_an_attempt_that_takes_too_long_is_stopped_and_made_again(tmp_path: Path) -> None:
    async with _live(tmp_path, attempt_s=0.05, max_attempts=1000) as (service, storage):
        storage.hold(only=KEYS[0])
        write = await written(service, KEYS)
        await until(lambda: storage.begun.count((0, KEYS[0])) > 2)
        assert not write.settled
        storage.release()
        await settled(write)
        assert write.durable == 8


async def test_storage_where_everything_hangs_is_left_alone(tmp_path: Path) -> None:
    async with _live(tmp_path, attempt_s=0.02) as (service, storage):
        storage.hold(stubborn=True)
        write = await written(service, KEYS)
        behind = _prefetches(service)._writes
        await until(lambda: len(behind._late) >= 4)
        await asyncio.sleep(0.1)  # for more of them to begin, which they must not
        assert len(storage.begun) == behind.in_flight <= 5
        refused = await _prefetches(service).begin_write("m", make_keys(64, "more"), {})
        assert (refused.granted, refused.reason) == (56, "back_pressure")
        storage.release()
        await settled(write)
        assert write.durable == 8


@pytest.mark.parametrize("seed", range(3))
async def test_tasks_that_are_cancelled_at_random_lose_no_page(tmp_path: Path, seed: int) -> None:
    randomness = random.Random(seed)
    async with _live(tmp_path, max_attempts=1000) as (service, storage):
        tasks = _prefetches(service)._tasks
        assert tasks is not None
        writes = [await written(service, make_keys(6, f"chain {number}")) for number in range(5)]
        storage.hold()
        for turn in range(200):
            if turn == 100:
                storage.release()
            for task in list(tasks._tasks):
                if randomness.random() < 0.3:
                    task.cancel()
            for _ in range(randomness.randrange(4)):
                await asyncio.sleep(0)
            check_integrity(service.engine)
        for write in writes:
            await settled(write)
            assert (write.durable, write.failed) == (6, 0)
        await service.idle()


async def test_a_caller_that_leaves_while_l3_is_asked_has_taken_nothing(tmp_path: Path) -> None:
    async with _live(tmp_path) as (service, _):
        service.storage.hang_probes()
        asking = asyncio.create_task(_prefetches(service).begin_write("m", KEYS, {}))
        await until(lambda: service.storage.probes == 1)
        asking.cancel()
        await asyncio.wait([asking])
        assert not list(service.engine.writes)
        service.storage.release()
        await service.idle()


async def test_callers_that_wait_for_l3_may_leave(tmp_path: Path) -> None:
    async with _live(tmp_path) as (service, storage):
        storage.hold()
        write = await written(service, KEYS)
        waiting = [asyncio.create_task(_prefetches(service).wait_for_write(write)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait([waiting[0]])
        storage.release()
        await asyncio.wait_for(asyncio.gather(*waiting[1:]), 10)
        assert write.durable == 8


# ---- the end of the service


async def test_a_clean_stop_writes_out_what_is_dirty(tmp_path: Path) -> None:
    async with _live(tmp_path) as (service, storage):
        storage.hold()
        write = await written(service, KEYS)
        stopping = asyncio.create_task(_prefetches(service).stop(20))
        await until(lambda: service.engine.stopping)
        storage.release()
        assert await stopping
        assert (write.durable, kv_of(service, storage, KEYS)) == (8, KEYS)


async def test_a_stop_tries_once_more_what_waits_for_an_attempt(tmp_path: Path) -> None:
    async with _live(tmp_path, quick=False) as (service, storage):
        storage.error = OSError("full")
        write = await written(service, KEYS)
        await until(lambda: service.engine.writes.backlog == 0)
        storage.error = None
        assert await _prefetches(service).stop(20)
        assert write.durable == 8


async def test_a_stop_without_l3_leaves_the_pages_dirty_for_the_next_start(tmp_path: Path) -> None:
    """Killed or stopped: what L3 does not have is still in the pool, and marked so."""
    async with _live(tmp_path, max_attempts=1, quick=False) as (service, storage):
        write = await service.parts.service.begin_write("m", KEYS, {})
        fill(service, write)
        _prefetches(service).commit_write(write.id)
        storage.error = StorageUnavailableError("told to")
        waiting = asyncio.create_task(_prefetches(service).wait_for_write(write))
        assert await _prefetches(service).stop(20)
        await asyncio.wait_for(waiting, 1)
        assert (write.durable, write.failed, service.engine.pools["m"].dirty(0)) == (0, 0, 8)
    async with _live(tmp_path) as (service, storage):
        await until(lambda: kv_of(service, storage, KEYS) == KEYS)
        await until(lambda: service.taken == 0)
        assert service.sweep() == 8
        assert (await service.client.prefetch("m", KEYS, wait_ms=5000)).pages.host == 8


async def test_a_stop_while_writes_hang_ends_within_its_grace(tmp_path: Path) -> None:
    async with _live(tmp_path) as (service, storage):
        storage.hold(stubborn=True)
        write = await written(service, KEYS)
        waiting = asyncio.create_task(_prefetches(service).wait_for_write(write))
        await until(lambda: storage.at_once == 1)
        assert not await _prefetches(service).stop(0.1)
        await asyncio.wait_for(waiting, 1)
        storage.release()
        await asyncio.wait([service.running])
        assert write.durable == 1
        check_integrity(service.engine)


async def test_slots_lent_before_a_start_stay_out_of_use(tmp_path: Path) -> None:
    async with _live(tmp_path, 8) as (service, _):
        write = await _prefetches(service).begin_write("m", KEYS[:3], {})
        lent = set(write.slots_of(0))
    async with _live(tmp_path, 8, quick=False) as (service, _):
        assert service.engine.pools["m"].slots[0].filling == 3
        others = await _prefetches(service).begin_write("m", KEYS, {})
        assert (others.granted, others.reason) == (5, "back_pressure")
        assert not lent & set(others.slots_of(0))
