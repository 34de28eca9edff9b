"""File names of vLLM's fs tier and of LMCache's fs adapter, and what is found in their directories."""

import asyncio
import os
from pathlib import Path

import pytest

from forestage.core.layout import Component, Covers, LmcacheNaming, ModelLayout, VllmNaming
from forestage.storage.directory import DirectoryStorage
from forestage.storage.listing import list_pages
from forestage.storage.lmcache import LmcacheFileStorage
from forestage.storage.vllm import VllmFileStorage

KEY = bytes.fromhex("61b9" + "05" * 30)
HASH = KEY.hex()
KV, STATE = Component("kv", 4096), Component("mamba", 100, covers=Covers.TAIL, window=1)
VLLM = ModelLayout("m", 64, (KV, STATE), vllm=VllmNaming("acme_m_0123456789ab_r0"))


def lmcache(shards: int = 1, salt: str = "", name: str = "bench/model") -> ModelLayout:
    components = (Component("kv", 64, shards), Component("mamba", 64, shards, Covers.TAIL, 1))
    return ModelLayout("m", 256, components, shards, lmcache=LmcacheNaming(name, salt))


def names(storage: DirectoryStorage, model: ModelLayout, component: int) -> list[str]:
    try:
        return [os.path.relpath(path, storage.root) for path in storage.shelves(model)[component].paths(KEY)]
    finally:
        asyncio.run(storage.aclose())


@pytest.mark.parametrize("group", [0, 1])
def test_vllm_has_a_folder_for_each_group(tmp_path: Path, group: int) -> None:
    expected = f"acme_m_0123456789ab_r0/61b/90_g{group}/{HASH}.bin"
    assert names(VllmFileStorage(tmp_path), VLLM, group) == [expected]


@pytest.mark.parametrize(
    ("model", "component", "expected"),
    [
        (lmcache(), 0, [f"bench-SEP-model@0x01000100@0@{HASH}.data"]),
        (lmcache(), 1, [f"bench-SEP-model@0x01000100@1@{HASH}.data"]),
        (lmcache(salt="ab12" * 8), 0, [f"bench-SEP-model@0x01000100@0@{HASH}@{'ab12' * 8}.data"]),
        (lmcache(2), 0, [f"bench-SEP-model@0x02000200@0@{HASH}.data", f"bench-SEP-model@0x02010201@0@{HASH}.data"]),
        (lmcache(16), 0, [f"bench-SEP-model@0x10{rank:02x}10{rank:02x}@0@{HASH}.data" for rank in range(16)]),
    ],
)
def test_lmcache_names_model_ranks_and_group(
    tmp_path: Path, model: ModelLayout, component: int, expected: list[str]
) -> None:
    assert names(LmcacheFileStorage(tmp_path), model, component) == expected


def test_what_cannot_be_named_is_refused(tmp_path: Path) -> None:
    for storage, model, words in (
        (VllmFileStorage(tmp_path), ModelLayout("m", 64, (KV,)), "no folder of vLLM's"),
        (VllmFileStorage(tmp_path), ModelLayout("m", 64, (Component("kv", 1, 2),), vllm=VLLM.vllm), "1 file a page"),
        (LmcacheFileStorage(tmp_path), lmcache(256), "1 to 255 ranks"),
    ):
        with pytest.raises(ValueError, match=words):
            names(storage, model, 0)


@pytest.mark.parametrize(
    ("kind", "model"),
    [(VllmFileStorage, VLLM), (LmcacheFileStorage, lmcache(3, "ab12" * 8)), (LmcacheFileStorage, lmcache())],
)
def test_pages_are_listed(
    tmp_path: Path, kind: type[VllmFileStorage] | type[LmcacheFileStorage], model: ModelLayout
) -> None:
    storage = kind(tmp_path)
    keys = [bytes([page, page ^ 0x5A]) * 16 for page in range(0, 250, 7)]
    for component, some in ((0, keys), (1, keys[::9])):
        size = model.components[component].bytes
        for key in some:
            asyncio.run(storage.write(model, component, key, [bytes(size)] * model.components[component].shards))
    # Other models', other files, and temporary ones.
    broken = Path(storage.shelves(model)[0].paths(keys[0])[-1])
    for name in ("x", f"{keys[0].hex()}.bin.tmp", f"other@0x01000100@0@{keys[0].hex()}.data", f"{'0' * 63}.bin"):
        (broken.parent / name).write_bytes(b"x")
    expected = [(0, key) for key in keys] + [(1, key) for key in keys[::9]]
    assert sorted(storage.iter_pages(model)) == sorted(expected)
    broken.write_bytes(b"short")
    listed = asyncio.run(list_pages(storage, model))
    assert sorted((page.component_index, page.key) for page in listed) == sorted(expected)
    assert [page.key for page in listed if not page.is_whole] == [keys[0]]
    broken.unlink()
    assert sorted(storage.iter_pages(model)) == sorted(expected[1:])
    asyncio.run(storage.aclose())
