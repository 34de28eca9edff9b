"""The file storage keeps the contract, through the page cache and around it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from contract.storage_contract import Back, StorageContract
from forestage.core.layout import ModelLayout
from forestage.storage.files import FileStorage


class FileBack(Back):
    storage: FileStorage

    def __init__(self, root: Path, *, direct: bool) -> None:
        self.storage = FileStorage(root, direct=direct)
        self.root = root

    def path(self, model: ModelLayout, component_index: int, key: bytes, shard: int) -> Path:
        name = key.hex()
        component = model.components[component_index].name
        return self.root / model.fingerprint / component / name[:2] / f"{name}-{shard}.page"

    async def get(self, model: ModelLayout, component_index: int, key: bytes, shard: int) -> bytes | None:
        path = self.path(model, component_index, key, shard)
        return path.read_bytes() if path.exists() else None

    async def put(self, model: ModelLayout, component_index: int, key: bytes, shard: int, value: bytes) -> None:
        self.path(model, component_index, key, shard).write_bytes(value)

    async def remove(self, model: ModelLayout, component_index: int, key: bytes, shard: int) -> None:
        self.path(model, component_index, key, shard).unlink()


class TestFiles(StorageContract):
    @pytest_asyncio.fixture(params=["cached", "direct"])
    async def back(self, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[FileBack]:
        back = FileBack(tmp_path / "l3", direct=request.param == "direct")
        await back.storage.open()
        yield back
        back.storage.check_integrity()
        await back.storage.aclose()
