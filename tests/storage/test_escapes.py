"""Nothing in an L3 directory leads a read, a write, a removal, a listing or a sweep out of it, in any layout."""

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from contract.storage_contract import CORRUPT, KV, LOADED, MISSING, Landing, hybrid, keys, payloads, store
from forestage.core.layout import VllmNaming
from forestage.storage import beneath
from forestage.storage.base import ReadOutcome
from forestage.storage.directory import DirectoryStorage
from forestage.storage.files import FileStorage
from forestage.storage.hicache import HicacheFileStorage
from forestage.storage.leftovers import OLD_S, new_temporary
from forestage.storage.listing import list_pages
from forestage.storage.lmcache import LmcacheFileStorage
from forestage.storage.vllm import VllmFileStorage

MODEL = replace(hybrid(shards=1), vllm=VllmNaming("m_0123456789ab_r0"))
PAGES = keys(3)
LAYOUTS: dict[str, Callable[[Path], DirectoryStorage]] = {
    "file": FileStorage,
    "file, direct": lambda root: FileStorage(root, direct=True),
    "hicache-file": HicacheFileStorage,
    "vllm-file": VllmFileStorage,
    "lmcache-file": LmcacheFileStorage,
}


@pytest.fixture(params=["openat2", "by steps"])
def _opening(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "by steps":
        monkeypatch.setattr(beneath, "_has_openat2", lambda: False)
    else:
        assert beneath._has_openat2()


@pytest_asyncio.fixture(params=LAYOUTS)
async def storage(tmp_path: Path, request: pytest.FixtureRequest, _opening: None) -> AsyncIterator[DirectoryStorage]:
    (tmp_path / "l3").mkdir()
    storage = LAYOUTS[request.param](tmp_path / "l3")
    await store(storage, MODEL, KV, *PAGES)
    yield storage
    storage.check_integrity()
    await storage.aclose()


def path_of(storage: DirectoryStorage, key: bytes) -> Path:
    return Path(storage.shelves(MODEL)[KV].paths(key)[0])


def _tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[str(path.relative_to(folder))] = (status.st_mode, content)
    return found


def _folders_between(storage: DirectoryStorage, path: Path) -> list[Path]:
    return [folder for folder in path.parents if Path(storage.root) in folder.parents]


async def _read(storage: DirectoryStorage, *pages: bytes) -> list[ReadOutcome]:
    landing = Landing(MODEL, KV, list(pages))
    return await landing.read(storage)


async def test_no_folder_that_is_a_link_is_gone_through(tmp_path: Path, storage: DirectoryStorage) -> None:
    path = path_of(storage, PAGES[0])
    for number, folder in enumerate(_folders_between(storage, path)):
        outside = tmp_path / f"outside-{number}"
        folder.rename(outside)
        old = outside / path.parent.relative_to(folder) / Path(new_temporary("")).name
        _lay_old(old)
        before = _tree(outside)
        folder.symlink_to(outside)
        assert await _read(storage, PAGES[0]) == [CORRUPT]
        for work in (
            storage.write(MODEL, KV, PAGES[0], payloads(MODEL, KV, PAGES[0])),
            storage.delete(MODEL, KV, PAGES[0]),
        ):
            with pytest.raises(OSError, match="symbolic links") as raised:
                await work
            assert raised.value.errno == errno.ELOOP
        assert PAGES[0] not in {page.key for page in await list_pages(storage, MODEL)}
        assert PAGES[0] not in {key for _, key in storage.iter_pages(MODEL)}
        storage._sweep()
        assert _tree(outside) == before
        folder.unlink()
        outside.rename(folder)
        assert await _read(storage, *PAGES) == [LOADED] * 3


def _lay_old(path: Path) -> None:
    path.write_bytes(b"somebody's")
    os.utime(path, (time.time() - 2 * OLD_S,) * 2)


async def test_a_root_that_is_a_link_is_the_operators(tmp_path: Path, storage: DirectoryStorage) -> None:
    os.rename(storage.root, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", storage.root)
    more = keys(1, "more")
    await store(storage, MODEL, KV, *more)
    assert await _read(storage, *PAGES, *more) == [LOADED] * 4
    assert {page.key for page in await list_pages(storage, MODEL)} == {*PAGES, *more}
    assert await storage.delete(MODEL, KV, more[0])
    old = Path(new_temporary(str(path_of(storage, PAGES[0]).parent)))
    _lay_old(old)
    storage._sweep()
    assert old.name not in os.listdir(old.parent)


ODD: dict[str, tuple[Callable[[Path, Path], object], ReadOutcome]] = {
    "link to a page": (lambda path, outside: path.symlink_to(outside), CORRUPT),
    "dangling link": (lambda path, outside: path.symlink_to("nowhere"), CORRUPT),
    "link to itself": (lambda path, outside: path.symlink_to(path), CORRUPT),
    "link to memory": (lambda path, outside: path.symlink_to("/proc/self/mem"), CORRUPT),
    "directory": (lambda path, outside: path.mkdir(), CORRUPT),
    "fifo": (lambda path, outside: os.mkfifo(path), CORRUPT),
    "endless device": (lambda path, outside: os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5)), CORRUPT),
    "empty device": (lambda path, outside: os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3)), CORRUPT),
    "hard link to a page": (lambda path, outside: path.hardlink_to(outside), LOADED),
}


@pytest.mark.parametrize("what", ODD)
async def test_an_odd_entry_in_place_of_a_page(tmp_path: Path, storage: DirectoryStorage, what: str) -> None:
    if "device" in what and os.geteuid() != 0:
        pytest.skip("making devices needs root")
    make, outcome = ODD[what]
    path, outside = path_of(storage, PAGES[1]), tmp_path / "outside"
    outside.write_bytes(path.read_bytes())
    before = outside.read_bytes()
    path.unlink()
    make(path, outside)
    assert await _read(storage, PAGES[1]) == [outcome]
    assert await _read(storage, PAGES[0], PAGES[2]) == [LOADED] * 2
    with contextlib.suppress(OSError):  # a directory is not replaced
        await storage.write(MODEL, KV, PAGES[1], [bytes(part) for part in payloads(MODEL, KV, PAGES[2])])
    assert outside.read_bytes() == before
    with contextlib.suppress(OSError):
        await storage.delete(MODEL, KV, PAGES[1])
    assert outside.read_bytes() == before
    assert path.is_dir() == (what == "directory")
    assert not [name for name in path.parent.iterdir() if name.suffix == ".tmp"]


async def test_odd_names_are_passed_over(storage: DirectoryStorage) -> None:
    folder = os.fsencode(path_of(storage, PAGES[0]).parent)
    whole = path_of(storage, PAGES[0]).name.encode()
    names = [
        b"\xff\xfe" + whole,
        whole + b"\xff",
        whole + b"\n",
        b"." + whole,
        whole.upper(),
        whole.replace(b".", b"%00."),
        b"a" * 255,
        b"0" * (255 - 4) + b".bin",
        b"...",
        b"-rf",
        "\u202e".encode() + whole,
    ]
    for name in names:
        os.close(os.open(folder + b"/" + name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    assert {page.key for page in await list_pages(storage, MODEL)} == set(PAGES)
    assert {key for _, key in storage.iter_pages(MODEL)} == set(PAGES)
    storage._sweep()
    assert set(names) <= set(os.listdir(folder))
    assert await _read(storage, *PAGES) == [LOADED] * 3


@pytest.mark.parametrize("layout", ["file", "vllm-file"])
async def test_a_folder_that_becomes_a_link_all_the_time(tmp_path: Path, layout: str) -> None:
    """However reads, writes and removals meet the change, what is outside stays as it is, and is never read."""
    storage = LAYOUTS[layout](tmp_path / "l3")
    (tmp_path / "l3").mkdir()
    await store(storage, MODEL, KV, *PAGES[:1])
    path = path_of(storage, PAGES[0])
    folder, outside, aside = path.parent, tmp_path / "outside", tmp_path / "aside"
    outside.mkdir()
    secret = path.read_bytes()[::-1]
    (outside / path.name).write_bytes(secret)
    before, over = _tree(outside), threading.Event()

    def swap() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                folder.rename(aside)
            with contextlib.suppress(OSError):
                folder.symlink_to(outside)
            with contextlib.suppress(OSError):
                folder.unlink()
            with contextlib.suppress(OSError):
                aside.rename(folder)

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        end = time.monotonic() + 1.5
        seen: set[ReadOutcome] = set()
        while time.monotonic() < end:
            seen.update(await _read(storage, PAGES[0]))
            with contextlib.suppress(OSError):
                await store(storage, MODEL, KV, PAGES[0])
            with contextlib.suppress(OSError):
                await storage.delete(MODEL, KV, PAGES[0])
            with contextlib.suppress(OSError):
                await store(storage, MODEL, KV, PAGES[0])
            storage._sweep()
    finally:
        over.set()
        swapping.join()
        await storage.aclose()
    assert _tree(outside) == before
    assert seen <= {LOADED, CORRUPT, MISSING}


async def test_files_have_the_modes_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        for name, make in LAYOUTS.items():
            storage = make(tmp_path / name)
            await store(storage, MODEL, KV, PAGES[0])
            path = path_of(storage, PAGES[0])
            assert stat.S_IMODE(path.stat().st_mode) == 0o640
            assert {stat.S_IMODE(folder.stat().st_mode) for folder in _folders_between(storage, path)} <= {0o750}
            await storage.aclose()
    finally:
        os.umask(before)
