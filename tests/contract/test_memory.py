"""The storage in memory keeps the contract, bare and behind the wrappers."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from contract.storage_contract import Back, StorageContract, hybrid, keys, store
from forestage.core.breaker import Breaker
from forestage.core.layout import ModelLayout
from forestage.storage.base import Storage
from forestage.storage.memory import MemoryStorage
from forestage.storage.wrap import FaultyStorage, GuardedStorage


class MemoryBack(Back):
    verifies_content = False

    def __init__(self, memory: MemoryStorage, storage: Storage) -> None:
        self.memory = memory
        self.storage = storage

    async def get(self, model: ModelLayout, component_index: int, key: bytes, shard: int) -> bytes | None:
        return self.memory.peek(model, component_index, key)[shard]

    async def put(self, model: ModelLayout, component_index: int, key: bytes, shard: int, value: bytes) -> None:
        shards = list(self.memory.peek(model, component_index, key))
        shards[shard] = value
        self.memory.put(model, component_index, key, shards)

    async def remove(self, model: ModelLayout, component_index: int, key: bytes, shard: int) -> None:
        assert self.memory.remove(model, component_index, key, shard)


def wrapped(memory: MemoryStorage, how: str) -> Storage:
    storage: Storage = memory
    if "faulty" in how:
        storage = FaultyStorage(storage)
    if "guarded" in how:
        storage = GuardedStorage(storage, probe_timeout_s=5, stall_timeout_s=5, breaker=Breaker(max_failures=100))
    return storage


class TestMemory(StorageContract):
    @pytest_asyncio.fixture(params=["bare", "faulty", "guarded", "faulty and guarded"])
    async def back(self, request: pytest.FixtureRequest) -> AsyncIterator[MemoryBack]:
        memory = MemoryStorage()
        storage = wrapped(memory, request.param)
        yield MemoryBack(memory, storage)
        await storage.aclose()

    async def test_iterates_over_whole_pages(self, back: MemoryBack) -> None:
        model, pages = hybrid(), keys(3)
        await store(back.storage, model, 0, *pages)
        await store(back.storage, model, 1, pages[2])
        await store(back.storage, hybrid("other"), 0, *pages)
        back.memory.remove(model, 0, pages[1], 0)
        assert sorted(back.memory.iter_pages(model)) == sorted([(0, pages[0]), (0, pages[2]), (1, pages[2])])
