"""Writes to a Redis that stands still, fails half-way or goes away: they end in time, and what is stored is whole."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from contract.storage_contract import KV, LOADED, MISSING, Landing, ask, bits, hybrid, keys, payloads, store
from forestage.core.breaker import Breaker
from forestage.core.errors import StorageUnavailableError
from forestage.storage.redis import RedisStorage
from forestage.storage.wrap import GuardedStorage
from support.redis_servers import RedisServer, standalone

STALL_S = 0.4
LATEST_S = 8.0  # on a busy machine
MODEL = hybrid(shards=2, kv_bytes=256 << 10)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with standalone(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest_asyncio.fixture
async def storage(server: RedisServer) -> AsyncIterator[GuardedStorage]:
    server.command("FLUSHALL")
    inner = RedisStorage(server.url, probe_timeout_s=LATEST_S, stall_timeout_s=LATEST_S)
    yield GuardedStorage(inner, probe_timeout_s=LATEST_S, stall_timeout_s=STALL_S, breaker=Breaker(max_failures=100))
    inner.check_integrity()
    await inner.aclose()


@pytest.mark.parametrize("connected", [True, False])
async def test_a_frozen_server_frees_the_buffers_in_time(
    server: RedisServer, storage: GuardedStorage, connected: bool
) -> None:
    pages = keys(6)
    if connected:
        await store(storage, MODEL, KV, pages[5])
    server.stop()
    try:
        buffers = [[bytearray(shard) for shard in payloads(MODEL, KV, key)] for key in pages[:5]]
        # More than there are writing threads: some are sent, some have no connection, some wait for a thread.
        async with asyncio.timeout(STALL_S + 2.5 + LATEST_S):
            ends = await asyncio.gather(
                *(storage.write(MODEL, KV, key, shards) for key, shards in zip(pages, buffers, strict=False)),
                return_exceptions=True,
            )
        assert [type(end) for end in ends] == [StorageUnavailableError] * 5
        for shards in buffers:
            for buffer in shards:
                buffer[:] = b"\xee" * len(buffer)
    finally:
        server.cont()
    await store(storage, MODEL, KV, pages[5])
    # Of what was under way all may have come after all, or nothing, or some shards: but never other bytes.
    assert set(await Landing(MODEL, KV, pages[:5]).read(storage)) <= {LOADED, MISSING}
    await store(storage, MODEL, KV, *pages)
    assert await Landing(MODEL, KV, pages).read(storage) == [LOADED] * 6


async def test_a_write_that_fails_half_way_leaves_no_page(server: RedisServer, storage: GuardedStorage) -> None:
    pages = keys(3)
    await store(storage, MODEL, KV, pages[0])
    # The second shard of any page is refused from now on, the first is not.
    server.command("ACL", "SETUSER", "default", "resetkeys", "%R~*", f"%W~forestage:{MODEL.fingerprint}:kv:0:*")
    try:
        with pytest.raises(OSError, match="NOPERM"):
            await store(storage, MODEL, KV, pages[1])
    finally:
        server.command("ACL", "SETUSER", "default", "allkeys")
    await store(storage, MODEL, KV, pages[2])
    assert bits((await ask(storage, MODEL, pages)).masks[KV][:2]) == "10"
    assert await Landing(MODEL, KV, pages).read(storage) == [LOADED, MISSING, LOADED]
    await store(storage, MODEL, KV, pages[1])
    assert await Landing(MODEL, KV, pages).read(storage) == [LOADED] * 3
