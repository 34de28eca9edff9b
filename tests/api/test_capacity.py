"""How much of a request is granted by a pool that is too small, full, or partly resident already."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from forestage_client import Prefetch
from support.live import Live, kv_only, live, make_keys, sum_of


@pytest_asyncio.fixture
async def big(tmp_path: Path) -> AsyncIterator[Live]:
    async with live(tmp_path, kv_only(1024)) as running:
        yield running


async def test_a_pool_of_256_pages(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(256)) as service:
        keys = make_keys(300)
        service.store(keys)
        whole = await service.client.prefetch("m", keys[:256], request_id="r", wait_ms=20_000)
        assert (whole.outcome, whole.pages.ready, whole.loaded) == ("complete", 256, 256)
        await service.client.cancel("r")
        # the pool is now full of pages that nobody leases: any request up to its capacity is granted whole
        for chain, pages in (("b", 1), ("c", 200), ("d", 256)):
            others = make_keys(pages, chain)
            service.store(others)
            job = await service.client.prefetch("m", others, request_id="r", wait_ms=20_000)
            assert (job.outcome, job.pages.granted, job.loaded) == ("complete", pages, pages)
            await service.client.cancel("r")
        assert sum_of(await service.quiet(), "evicted_pages_total") == 1 + 200 + 256
        over = await service.client.prefetch("m", keys[:257], request_id="r", wait_ms=20_000)
        assert (over.outcome, over.pages.stored, over.pages.granted, over.pages.ready) == ("partial", 257, 256, 256)
        assert dict(over.shortfall) == {"host_capacity": 1}
        await service.idle()


async def test_resident_pages_of_a_prefix_are_not_evicted_for_its_rest(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(8)) as service:
        keys = make_keys(12)
        service.store(keys)
        await service.client.prefetch("m", keys[:6], request_id="r", wait_ms=5000)
        await service.client.cancel("r")
        service.storage.reads.clear()
        job = await service.client.prefetch("m", keys, wait_ms=5000)
        assert (job.pages.host, job.pages.granted, job.pages.ready, job.loaded) == (6, 8, 8, 2)
        assert dict(job.shortfall) == {"host_capacity": 4}
        assert service.storage.reads == {(0, keys[6]): 1, (0, keys[7]): 1}
        assert sum_of(await service.quiet(), "evicted_pages_total") == 0
        await service.idle()


async def test_misses_evict_nothing(service: Live) -> None:
    keys = make_keys(64)
    service.store(keys)
    await service.client.prefetch("m", keys, request_id="r", wait_ms=5000)
    await service.client.cancel("r")
    asked = [service.client.prefetch("m", make_keys(20, f"absent {i}"), wait_ms=5000) for i in range(50)]
    assert {job.outcome for job in await asyncio.gather(*asked)} == {"miss"}
    # a page behind a gap is not wanted either
    late = make_keys(9, "late")
    service.store(late[1:])
    assert (await service.client.prefetch("m", late, wait_ms=5000)).pages.ready == 0
    samples = await service.quiet()
    assert (sum_of(samples, "evicted_pages_total"), service.sweep()) == (0, 64)
    assert sum(service.storage.reads.values()) == 64


@pytest.mark.parametrize("length", [7, 8, 9, 63, 64, 65, 127, 128, 129, 1000])
async def test_lengths_around_powers_of_two(big: Live, length: int) -> None:
    keys = make_keys(length, f"{length}")
    big.store(keys)
    whole = await big.client.prefetch("m", [*keys, *make_keys(3, "absent")], request_id="r", wait_ms=20_000)
    assert (whole.pages.stored, whole.pages.ready, whole.loaded) == (length, length, length)
    assert dict(whole.shortfall) == {"not_stored": 3}
    again = await big.client.prefetch("m", keys, wait_ms=20_000)
    assert (again.pages.host, again.pages.ready, again.loaded, again.slots) == (length, length, 0, whole.slots)
    await big.idle()


async def test_every_pattern_of_four_pages(big: Live) -> None:
    for pattern in itertools.product((False, True), repeat=4):
        keys = make_keys(4, f"{pattern}")
        big.store([key for key, there in zip(keys, pattern, strict=True) if there])
        leading = (*pattern, False).index(False)
        before = big.sweep()
        job = await big.client.prefetch("m", keys, request_id="r", wait_ms=20_000)
        assert (job.pages.stored, job.pages.ready) == (leading, leading)
        assert dict(job.shortfall) == ({"not_stored": 4 - leading} if leading < 4 else {})
        assert big.sweep() == before + leading
        await big.client.cancel("r")
    await big.idle()


async def test_6_free_and_4_of_10_stored_evicts_nothing(service: Live) -> None:
    resident, wanted = make_keys(58, "resident"), make_keys(10)
    service.store([*resident, *wanted[:4]])
    await service.client.prefetch("m", resident, request_id="r", wait_ms=5000)
    await service.client.cancel("r")
    job = await service.client.prefetch("m", wanted, wait_ms=5000)
    assert (job.pages.ready, dict(job.shortfall)) == (4, {"not_stored": 6})
    assert sum_of(await service.quiet(), "evicted_pages_total") == 0


async def _ask(service: Live, chain: str, pages: int, rounds: int, random_s: random.Random) -> list[Prefetch]:
    jobs = []
    for turn in range(rounds):
        request_id = f"{chain}-{turn}"
        keys = make_keys(pages, chain)
        job = await service.client.prefetch("m", keys, request_id=request_id, wait_ms=20_000)
        leased = {slot for lease in service.engine.leases for slot in lease.slots[0]}
        assert len(leased) <= 64
        jobs.append(job)
        await asyncio.sleep(random_s.random() / 500)
        await service.client.cancel(request_id)
    return jobs


async def test_fifteen_clients_want_more_than_there_is(service: Live) -> None:
    randomness = random.Random(15)
    for pages in (38, 64):
        chains = [f"{pages}-{client}" for client in range(15)]
        for chain in chains:
            service.store(make_keys(pages, chain))
        asking = [_ask(service, chain, pages, 7, randomness) for chain in chains]
        async with asyncio.timeout(30):
            jobs = [job for jobs in await asyncio.gather(*asking) for job in jobs]
        assert all(job.done for job in jobs)
        for job in jobs:
            assert set(job.shortfall) <= {"host_capacity"}
            assert job.pages.stored == pages
        assert any(job.outcome == "complete" for job in jobs)
    await service.idle()
    again = await service.client.prefetch("m", make_keys(64, "64-0"), wait_ms=20_000)
    assert again.outcome == "complete"
    await service.idle()


async def test_a_pool_full_of_idle_leases_answers_at_once(service: Live) -> None:
    held = make_keys(64, "held")
    service.store(held)
    await service.client.prefetch("m", held, wait_ms=5000)
    chains = [make_keys(10, f"client {i}") for i in range(5)]
    for keys in chains:
        service.store(keys)
    began = asyncio.get_running_loop().time()
    jobs = await asyncio.gather(*(service.client.prefetch("m", keys, wait_ms=20_000) for keys in chains))
    assert asyncio.get_running_loop().time() - began < 1
    assert {(job.outcome, job.pages.stored, job.shortfall["host_capacity"]) for job in jobs} == {("miss", 10, 10)}
    # and a job of half the pool gets it all once the pages are not leased any more
    await service.idle()
    half = make_keys(32, "half")
    service.store(half)
    assert (await service.client.prefetch("m", half, wait_ms=5000)).pages.ready == 32
    await service.idle()


async def test_twice_the_pool_in_turns_without_a_trend(service: Live) -> None:
    chains = [make_keys(32, f"chain {i}") for i in range(4)]
    for keys in chains:
        service.store(keys)
    for turn in range(50):
        job = await service.client.prefetch("m", chains[turn % 4], request_id="r", wait_ms=5000)
        assert job.outcome == "complete"
        await service.client.cancel("r")
    await service.idle()
