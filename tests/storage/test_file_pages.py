"""What only files can do wrong: odd entries, partial files, full disks, foreign names, big pages."""

import asyncio
import ctypes
import errno
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from contract.polling import until
from contract.storage_contract import Landing, hybrid, keys, payloads, store
from forestage.core.errors import StartError, StorageUnavailableError
from forestage.core.layout import Component, ModelLayout
from forestage.storage import shelf
from forestage.storage.base import Probe, ReadOutcome
from forestage.storage.files import FileStorage

KV = 0
LOADED, MISSING, CORRUPT, ERROR = ReadOutcome.LOADED, ReadOutcome.MISSING, ReadOutcome.CORRUPT, ReadOutcome.ERROR
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts or changes its user")


@pytest_asyncio.fixture(params=[False, True], ids=["cached", "direct"])
async def storage(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[FileStorage]:
    storage = FileStorage(tmp_path / "l3", direct=request.param)
    await storage.open()
    yield storage
    storage.check_integrity()
    await storage.aclose()


def path_of(storage: FileStorage, model: ModelLayout, key: bytes, shard: int = 0) -> Path:
    mine = storage.shelves(model)[KV]
    return Path(mine.paths(key)[shard])


def temporaries(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.suffix == ".tmp"]


async def present(storage: FileStorage, model: ModelLayout, pages: list[bytes]) -> bytes:
    return bytes((await storage.probe(model, Probe(pages, 0, 0, bytes(len(pages))))).masks[KV])


async def read(storage: FileStorage, model: ModelLayout, pages: list[bytes]) -> list[ReadOutcome]:
    return await Landing(model, KV, pages).read(storage)


def make_directory(path: Path, good: bytes) -> None:
    path.mkdir()


def make_fifo(path: Path, good: bytes) -> None:
    os.mkfifo(path)


def make_socket(path: Path, good: bytes) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket may have 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def make_dangling_link(path: Path, good: bytes) -> None:
    path.symlink_to(path.parent / "nowhere")


def make_link_to_good(path: Path, good: bytes) -> None:
    target = path.parent / "elsewhere"
    target.write_bytes(good)
    path.symlink_to(target)


def make_sparse(path: Path, good: bytes) -> None:
    with path.open("wb") as file:
        file.truncate(len(good))


def make_huge(path: Path, good: bytes) -> None:
    with path.open("wb") as file:
        file.truncate(4 << 30)


def make_foreign(path: Path, good: bytes) -> None:
    path.write_bytes(b"\x80\x04\x95" + bytes(200))


ODD: list[tuple[Callable[[Path, bytes], None], ReadOutcome]] = [
    (make_directory, CORRUPT),
    (make_fifo, CORRUPT),
    (make_socket, CORRUPT),
    (make_dangling_link, CORRUPT),
    (make_link_to_good, CORRUPT),
    (make_sparse, CORRUPT),
    (make_huge, CORRUPT),
    (make_foreign, CORRUPT),
]


@pytest.mark.parametrize(("make", "outcome"), ODD)
async def test_odd_entries_spoil_one_page(
    storage: FileStorage, make: Callable[[Path, bytes], None], outcome: ReadOutcome
) -> None:
    model, pages = hybrid(shards=1), keys(3)
    await store(storage, model, KV, *pages)
    path = path_of(storage, model, pages[1])
    good = path.read_bytes()
    path.unlink()
    make(path, good)
    assert await read(storage, model, pages) == [LOADED, outcome, LOADED]
    assert (await present(storage, model, pages))[:1] == b"\1"
    assert await read(storage, model, pages[::-1]) == [LOADED, outcome, LOADED]


async def test_a_file_in_the_place_of_a_directory_is_a_miss(storage: FileStorage) -> None:
    model, pages = hybrid(), keys(1)
    directory = path_of(storage, model, pages[0]).parent
    directory.parent.mkdir(parents=True)
    directory.write_bytes(b"")
    assert await present(storage, model, pages) == b"\0"
    assert await read(storage, model, pages) == [MISSING]


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user can enter."""
    with tempfile.TemporaryDirectory(prefix="forestage-test-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@needs_root
@pytest.mark.parametrize("what", ["file", "directory"])
async def test_unreadable_pages_are_there_and_errors(public: Path, what: str) -> None:
    storage = FileStorage(public / "l3")
    model, pages = hybrid(shards=1), keys(3)
    await store(storage, model, KV, *pages)
    await storage.aclose()
    path = path_of(storage, model, pages[1])
    (path if what == "file" else path.parent).chmod(0)
    reader = Path(__file__).with_name("read_as_nobody.py")
    environment = {**os.environ, "PYTHONPATH": str(reader.parents[1])}
    process = await asyncio.create_subprocess_exec(
        sys.executable, reader, public / "l3", stdout=subprocess.PIPE, env=environment
    )
    answer, _ = await asyncio.wait_for(process.communicate(), 30)
    assert json.loads(answer) == {"present": [1, 1, 1], "outcomes": ["loaded", "error", "loaded"]}


async def test_a_growing_file_is_no_hit_before_it_is_whole(storage: FileStorage) -> None:
    model, pages = hybrid(shards=1), keys(1)
    await store(storage, model, KV, *pages)
    path = path_of(storage, model, pages[0])
    value = path.read_bytes()
    path.unlink()
    steps = [len(value) * step // 10 for step in range(11)]
    with path.open("wb", buffering=0) as file:
        for begin, end in itertools.pairwise(steps):
            assert await read(storage, model, pages) == [CORRUPT]
            file.write(value[begin:end])
    assert await read(storage, model, pages) == [LOADED]


async def test_a_value_under_another_models_name_is_corrupt(storage: FileStorage) -> None:
    mine, other = hybrid("acme/one", shards=1), hybrid("acme/two", shards=1)
    pages = keys(1)
    await store(storage, mine, KV, *pages)
    path = path_of(storage, other, pages[0])
    path.parent.mkdir(parents=True)
    path.write_bytes(path_of(storage, mine, pages[0]).read_bytes())
    assert await read(storage, other, pages) == [CORRUPT]


CHUNK = 64 << 10


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "CHUNK_BYTES", CHUNK)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("beyond", [-1, 0, 1, 4096, CHUNK + 5000])
async def test_pages_larger_than_a_chunk(storage: FileStorage, beyond: int) -> None:
    model, pages = ModelLayout("big", 64, (Component("kv", CHUNK + beyond),)), keys(2)
    await store(storage, model, KV, *pages)
    landing = Landing(model, KV, pages)
    assert await landing.read(storage) == [LOADED] * 2
    path = path_of(storage, model, pages[0])
    os.truncate(path, path.stat().st_size - 1)
    assert await read(storage, model, pages) == [CORRUPT, LOADED]
    os.truncate(path, path.stat().st_size + 2)
    assert await read(storage, model, pages) == [CORRUPT, LOADED]


@pytest.mark.usefixtures("small_chunks")
async def test_a_large_page_shows_progress_and_stops_between_chunks(storage: FileStorage) -> None:
    model, pages = ModelLayout("big", 64, (Component("kv", 100 * CHUNK),)), keys(2)
    await store(storage, model, KV, *pages)
    landing = Landing(model, KV, pages)
    reading = asyncio.create_task(storage.read_into(model, landing.reads, landing.report))
    await until(lambda: landing.reads[1].progress > 1)
    landing.reads[1].stopped = True
    await reading
    assert landing.outcomes()[0] is LOADED
    assert landing.reads[0].progress >= 100
    assert landing.outcomes()[1] in {LOADED, ReadOutcome.STOPPED}
    landing.check()


async def test_direct_reads_fill_slots_of_any_alignment(storage: FileStorage) -> None:
    for size in (100, 4096, 5000, 8192, 12288 + 96, 65536):
        model, pages = hybrid(f"size {size}", shards=1, kv_bytes=size), keys(2)
        await store(storage, model, KV, *pages)
        assert await read(storage, model, pages) == [LOADED] * 2
        path = path_of(storage, model, pages[0])
        path.write_bytes(path.read_bytes() + bytes(9000))
        assert await read(storage, model, pages) == [CORRUPT, LOADED]
        path.write_bytes(path.read_bytes()[: size // 2])
        assert await read(storage, model, pages) == [CORRUPT, LOADED]


async def test_a_root_that_cannot_be_made_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        storage = FileStorage(root)
        with pytest.raises(StartError, match=r"storage\.file\.root: cannot make .*file"):
            await storage.open()
        await storage.aclose()


async def test_a_root_that_went_away_is_unavailable_until_it_is_back(storage: FileStorage) -> None:
    model, pages = hybrid(), keys(2)
    await store(storage, model, KV, *pages)
    os.rename(storage.root, storage.root + ".away")
    with pytest.raises(StorageUnavailableError, match="No such file"):
        await present(storage, model, pages)
    assert await read(storage, model, pages) == [MISSING] * 2
    os.rename(storage.root + ".away", storage.root)
    assert await present(storage, model, pages) == b"\1\1"
    assert await read(storage, model, pages) == [LOADED] * 2


async def test_probe_stops_at_the_first_gap(storage: FileStorage) -> None:
    model, pages = hybrid(), keys(20_000)
    await store(storage, model, KV, pages[0], pages[-1])
    began = time.thread_time()
    assert await present(storage, model, pages) == b"\1" + bytes(19_999)
    await present(storage, model, pages[:2])
    assert time.thread_time() - began < 1


async def test_writes_of_a_wrong_size_are_refused(storage: FileStorage) -> None:
    model, key = hybrid(), keys(1)[0]
    for shards in ([b""], [bytes(4096)], [bytes(4096), bytes(4095)], [bytes(4096)] * 3):
        with pytest.raises(ValueError, match="want 2 shards of 4096 bytes"):
            await storage.write(model, KV, key, shards)


async def test_a_cancelled_write_is_whole_or_not_there(storage: FileStorage) -> None:
    model, pages = hybrid(shards=4, kv_bytes=262144), keys(12)
    writes = [asyncio.create_task(store(storage, model, KV, key)) for key in pages]
    await until(lambda: any(storage.iter_pages(model)))
    for write in writes:
        write.cancel()
    await asyncio.gather(*writes, return_exceptions=True)
    there = [key for _, key in storage.iter_pages(model)]
    assert await read(storage, model, there) == [LOADED] * len(there)
    assert not temporaries(Path(storage.root))


async def test_iterates_over_whole_pages_of_the_model(storage: FileStorage) -> None:
    model, pages = hybrid(), keys(40)
    await store(storage, model, KV, *pages)
    await store(storage, model, 1, *pages[10:12])
    await store(storage, hybrid("other"), KV, *keys(3, "other"))
    path_of(storage, model, pages[5], 1).unlink()
    directory = path_of(storage, model, pages[0]).parent
    for foreign in ("x", f".{'0' * 32}.tmp", f"{'0' * 64}-7.page", f"{'0' * 30}-0.page", f"{'G' * 64}-0.page"):
        (directory / foreign).write_bytes(b"")
    found = list(storage.iter_pages(model))
    assert len(found) == len(set(found))
    assert set(found) == {(0, key) for key in pages if key != pages[5]} | {(1, key) for key in pages[10:12]}
    assert list(storage.iter_pages(hybrid("unknown"))) == []


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 256 KiB."""
    libc = ctypes.CDLL(None, use_errno=True)
    root = tmp_path / "tiny"
    root.mkdir()
    if libc.mount(b"test", bytes(root), b"tmpfs", 0, b"size=256k") != 0:
        raise OSError(ctypes.get_errno(), "mount")
    yield root
    assert libc.umount2(bytes(root), 2) == 0


@needs_root
async def test_a_full_disk_refuses_writes_and_nothing_else(tiny: Path) -> None:
    storage = FileStorage(tiny / "l3")
    await storage.open()
    model, pages = hybrid(kv_bytes=20_000), keys(8)
    await store(storage, model, KV, *pages[:4])
    for _ in range(3):
        with pytest.raises(OSError, match="No space left") as raised:
            await store(storage, model, KV, *pages[4:])
        assert raised.value.errno == errno.ENOSPC
    there = [key for _, key in storage.iter_pages(model)]
    assert set(pages[:4]) <= set(there) < set(pages)
    assert not temporaries(tiny)
    assert await read(storage, model, there) == [LOADED] * len(there)
    for key in there[:3]:
        assert await storage.delete(model, KV, key)
    await store(storage, model, KV, pages[7])
    assert await read(storage, model, [pages[7]]) == [LOADED]
    await storage.aclose()


async def test_an_evictor_beside_us_makes_misses_and_no_errors(storage: FileStorage) -> None:
    model, pages = hybrid(shards=1), keys(60)
    seen: set[ReadOutcome] = set()
    for turn in range(5):
        await store(storage, model, KV, *pages)
        reading = asyncio.gather(*(Landing(model, KV, pages).read(storage) for _ in range(4)))
        for key in pages[turn::3]:
            path_of(storage, model, key).unlink()
            await asyncio.sleep(0)
        for outcomes in await reading:
            seen.update(outcomes)
    assert seen <= {LOADED, MISSING}
    assert await read(storage, model, pages[:1]) in ([LOADED], [MISSING])


def test_payloads_differ() -> None:
    model = hybrid()
    assert len({content for key in keys(3) for c in (0, 1) for content in payloads(model, c, key)}) == 12
