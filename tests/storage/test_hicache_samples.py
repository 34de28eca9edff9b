"""Every page of the sample directories, as SGLang wrote them, through the storage."""

import hashlib
from pathlib import Path

import pytest

from forestage.core.errors import StorageUnavailableError
from forestage.core.layout import ModelLayout
from forestage.storage.base import PageRead, Probe, ReadOutcome
from forestage.storage.hicache import HicacheFileStorage
from support.manifests import Sample

SAMPLES = ["hicache-hybrid", "hicache-mla"]


def batch(layout: ModelLayout, pages: list[tuple[int, bytes]]) -> list[PageRead]:
    reads = []
    for component_index, key in pages:
        component = layout.components[component_index]
        views = tuple(memoryview(bytearray(component.bytes)) for _ in range(component.shards))
        reads.append(PageRead(component_index, key, views))
    return reads


@pytest.mark.parametrize("name", SAMPLES)
async def test_every_payload_is_the_manifests(name: str) -> None:
    sample = Sample.load(name)
    layout = sample.layout()
    storage = HicacheFileStorage(sample.root)
    pages = list(storage.iter_pages(layout))
    reads = batch(layout, pages)
    outcomes: dict[int, ReadOutcome] = {}
    await storage.read_into(layout, reads, outcomes.__setitem__)
    await storage.aclose()
    loaded: dict[tuple[str, str, int], str] = {}
    for index, read in enumerate(reads):
        if outcomes[index] is ReadOutcome.LOADED:
            component = layout.components[read.component_index].name
            for shard, view in enumerate(read.views):
                loaded[component, read.key.hex(), shard] = hashlib.sha256(view).hexdigest()
    whole, short = {}, set()
    for file in sample.manifest["files"]:
        page = (file["component"], file["name"].split("_")[0].split(".")[0], file["rank"])
        if "whole_bytes" in file:
            short.add(page)
        else:
            whole[page] = file["sha256"]
    assert loaded == whole
    assert {index for index, outcome in outcomes.items() if outcome is ReadOutcome.CORRUPT} == {
        index
        for index, read in enumerate(reads)
        if (layout.components[read.component_index].name, read.key.hex(), 0) in short
    }
    assert len(short) == (name == "hicache-mla")


@pytest.mark.parametrize("name", SAMPLES)
async def test_probe_finds_chains_and_states(name: str) -> None:
    sample = Sample.load(name)
    layout = sample.layout()
    storage = HicacheFileStorage(sample.root)
    for chain in sample.manifest["chains"].values():
        keys = [bytes.fromhex(key) for key in chain["keys"]]
        unknown = [bytes.fromhex(key) for key in sample.manifest["unknown_keys"]]
        masks = (await storage.probe(layout, Probe(keys + unknown, 0, 0, bytes(len(keys + unknown))))).masks
        assert masks[0] == b"\1" * len(keys) + bytes(len(unknown))
        if len(masks) > 1:
            boundaries = [page + 1 for page, there in enumerate(masks[1]) if there]
            assert boundaries == chain["boundaries"]
    await storage.aclose()


async def test_temporary_files_are_no_pages(tmp_path: Path) -> None:
    sample = Sample.load("hicache-mla")
    assert any(path.suffix == ".tmp" for path in sample.root.iterdir())
    assert len(list(HicacheFileStorage(sample.root).iter_pages(sample.layout()))) == 32


async def test_a_written_page_has_sglangs_name_and_bytes(tmp_path: Path) -> None:
    sample = Sample.load("hicache-hybrid")
    layout = sample.layout()
    source, target = HicacheFileStorage(sample.root), HicacheFileStorage(tmp_path / "made" / "new")
    pages = list(source.iter_pages(layout))
    reads = batch(layout, pages)
    await source.read_into(layout, reads, lambda *_: None)
    for read in reads:
        await target.write(layout, read.component_index, read.key, read.views)
    written = {path.name: path.read_bytes() for path in (tmp_path / "made" / "new").iterdir()}
    assert written == {path.name: path.read_bytes() for path in sample.root.iterdir()}
    assert sorted(target.iter_pages(layout)) == sorted(pages)
    await source.aclose()
    await target.aclose()


async def test_the_directory_may_come_later(tmp_path: Path) -> None:
    sample = Sample.load("hicache-mla")
    layout = sample.layout()
    storage = HicacheFileStorage(tmp_path / "later")
    await storage.open()
    key = bytes.fromhex(sample.manifest["chains"]["only"]["keys"][0])
    question = Probe([key], 0, 0, bytes(1))
    with pytest.raises(StorageUnavailableError, match="No such file"):
        await storage.probe(layout, question)
    with pytest.raises(StorageUnavailableError):
        list(storage.iter_pages(layout))
    assert not (tmp_path / "later").exists()
    (tmp_path / "later").symlink_to(sample.root)
    assert (await storage.probe(layout, question)).masks[0] == b"\1"
    await storage.aclose()
