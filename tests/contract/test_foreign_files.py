"""The storages in vLLM's and in LMCache's directory keep the contract; what a size cannot tell, they do not notice."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest_asyncio

from contract.storage_contract import Back, StorageContract
from forestage.core.layout import ModelLayout, VllmNaming
from forestage.storage.directory import DirectoryStorage
from forestage.storage.lmcache import LmcacheFileStorage
from forestage.storage.shelf import Shelf
from forestage.storage.vllm import VllmFileStorage


class ShardedVllm(VllmFileStorage):
    """vLLM's folders for models of any number of shards, which vLLM itself does not have."""

    def _shelf(self, model: ModelLayout, component_index: int) -> Shelf:
        components = tuple(replace(component, shards=1) for component in model.components)
        folder = VllmNaming(model.name.replace("/", "_") + "_0123456789ab_r0")
        shelf = super()._shelf(replace(model, components=components, vllm=folder), component_index)
        shards = range(model.components[component_index].shards)
        return replace(shelf, endings=tuple(f"-{shard}.bin" for shard in shards))


class ForeignBack(Back):
    verifies_content = False
    storage: DirectoryStorage

    def __init__(self, storage: DirectoryStorage) -> None:
        self.storage = storage

    def path(self, model: ModelLayout, component_index: int, key: bytes, shard: int) -> Path:
        return Path(self.storage.shelves(model)[component_index].paths(key)[shard])

    async def get(self, model: ModelLayout, component_index: int, key: bytes, shard: int) -> bytes | None:
        path = self.path(model, component_index, key, shard)
        return path.read_bytes() if path.exists() else None

    async def put(self, model: ModelLayout, component_index: int, key: bytes, shard: int, value: bytes) -> None:
        self.path(model, component_index, key, shard).write_bytes(value)

    async def remove(self, model: ModelLayout, component_index: int, key: bytes, shard: int) -> None:
        self.path(model, component_index, key, shard).unlink()


class TestVllm(StorageContract):
    @pytest_asyncio.fixture
    async def back(self, tmp_path: Path) -> AsyncIterator[ForeignBack]:
        (tmp_path / "kv").mkdir()
        back = ForeignBack(ShardedVllm(tmp_path / "kv"))
        yield back
        back.storage.check_integrity()
        await back.storage.aclose()


class TestLmcache(StorageContract):
    @pytest_asyncio.fixture
    async def back(self, tmp_path: Path) -> AsyncIterator[ForeignBack]:
        (tmp_path / "kv").mkdir()
        back = ForeignBack(LmcacheFileStorage(tmp_path / "kv"))
        yield back
        back.storage.check_integrity()
        await back.storage.aclose()
