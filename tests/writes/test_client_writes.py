"""The client's way of writing, against a service: slots filled through a writable view, committed or dropped."""

import asyncio
from pathlib import Path

import pytest

from forestage_client import Client, Gone, NotFound
from forestage_client.pool_view import PoolView, Stale
from support.live import content, hybrid, live, make_keys
from writes.slow_writes import SlowWrites, kv_of

KEYS = make_keys(8)


async def test_what_a_client_writes_is_prefetched_and_stored(tmp_path: Path) -> None:
    storage = SlowWrites()
    async with live(tmp_path, hybrid(32, 4), inner=storage) as service:
        with PoolView(service.parts.pool.path, writable=True) as view:
            async with service.client.write(view, "m", KEYS, {"state": [7, 3]}) as writer:
                for page, key in enumerate(KEYS):
                    writer.put("kv", page, content(key, "kv"))
                for page in (3, 7):
                    writer.put("state", page, content(KEYS[page], "state"))
            assert (writer.write.granted, writer.write.stored, writer.write.reason) == (8, (), None)
            assert writer.result is not None
            assert (writer.result.committed, writer.result.duplicate) == (8, 0)
            status = await service.client.write_status(writer.write.id, wait_ms=10_000)
            assert (status.durable, status.failed, status.settled) == (8, 0, True)
            assert kv_of(service, storage, KEYS) == KEYS
            job = await service.client.prefetch("m", KEYS, wait_ms=10_000)
            assert (job.outcome, job.pages.host, job.loaded) == ("complete", 8, 0)
            async with service.client.write(view, "m", KEYS, {"state": [7]}) as again:
                pass  # all of it is there
            assert again.write.stored == tuple(range(8))
        await service.idle()


async def test_a_failing_block_gives_its_slots_back(tmp_path: Path) -> None:
    async with live(tmp_path, hybrid(32, 4)) as service:
        with PoolView(service.parts.pool.path, writable=True) as view:

            async def write_some() -> None:
                async with service.client.write(view, "m", KEYS) as writer:
                    begun.append(writer.write.id)
                    writer.put("kv", 0, content(KEYS[0], "kv"))
                    raise OSError("no more")

            begun: list[str] = []
            with pytest.raises(OSError, match="no more"):
                await write_some()
            with pytest.raises(NotFound):
                await service.client.commit_write(begun[0])
        await service.idle()


async def test_an_expired_write_is_gone_for_the_client(tmp_path: Path) -> None:
    async with live(tmp_path, hybrid(32, 4), writes={"expire_ms": 100}) as service:
        write = await service.client.begin_write("m", KEYS)
        with pytest.raises(Gone):
            await service.client.write_status(write.id, wait_ms=20_000)
        with pytest.raises(Gone):
            await service.client.commit_write(write.id)


async def test_a_block_that_ends_too_late_is_stale(tmp_path: Path) -> None:
    async with live(tmp_path, hybrid(32, 4), writes={"expire_ms": 300}) as service:
        with PoolView(service.parts.pool.path, writable=True) as view:

            async def write_late() -> None:
                async with service.client.write(view, "m", KEYS[:1]) as writer:
                    writer.put("kv", 0, content(KEYS[0], "kv"))
                    with pytest.raises(Gone):
                        await service.client.write_status(writer.write.id, wait_ms=20_000)

            with pytest.raises(Stale, match="ended before it was committed"):
                await write_late()
        assert (await service.client.lookup("m", KEYS[:1])).pages.host == 0


async def test_the_blocking_client_writes_too(tmp_path: Path) -> None:
    async with live(tmp_path, hybrid(32, 4)) as service:

        def write() -> int:
            with (
                Client(f"http://127.0.0.1:{service.port}", timeout_s=20) as client,
                PoolView(client.pool().path, writable=True) as view,
            ):
                with client.write(view, "m", KEYS) as writer:
                    for page, key in enumerate(KEYS):
                        writer.put("kv", page, content(key, "kv"))
                return client.write_status(writer.write.id, wait_ms=10_000).durable

        assert await asyncio.to_thread(write) == 8
        await service.idle()
