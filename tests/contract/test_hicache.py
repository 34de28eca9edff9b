"""The storage in SGLang's directory keeps the contract; what a size cannot tell, it does not notice."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from contract.storage_contract import Back, StorageContract
from forestage.core.layout import ModelLayout
from forestage.storage.hicache import HicacheFileStorage
from forestage.storage.hicache_names import file_names


class HicacheBack(Back):
    verifies_content = False
    storage: HicacheFileStorage

    def __init__(self, root: Path) -> None:
        self.storage = HicacheFileStorage(root)
        self.root = root

    def path(self, model: ModelLayout, component_index: int, key: bytes, shard: int) -> Path:
        return self.root / file_names(model, component_index, key)[shard]

    async def get(self, model: ModelLayout, component_index: int, key: bytes, shard: int) -> bytes | None:
        path = self.path(model, component_index, key, shard)
        return path.read_bytes() if path.exists() else None

    async def put(self, model: ModelLayout, component_index: int, key: bytes, shard: int, value: bytes) -> None:
        self.path(model, component_index, key, shard).write_bytes(value)

    async def remove(self, model: ModelLayout, component_index: int, key: bytes, shard: int) -> None:
        self.path(model, component_index, key, shard).unlink()


class TestHicache(StorageContract):
    @pytest_asyncio.fixture
    async def back(self, tmp_path: Path) -> AsyncIterator[HicacheBack]:
        root = tmp_path / "hicache"
        root.mkdir()
        back = HicacheBack(root)
        yield back
        back.storage.check_integrity()
        await back.storage.aclose()
