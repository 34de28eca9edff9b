"""What killed writers left: swept when old and called as ours are, and nothing else is."""

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from contract.polling import until
from contract.storage_contract import KV, LOADED, Landing, hybrid, keys, store
from forestage.core.layout import Component, ModelLayout
from forestage.storage.directory import DirectoryStorage
from forestage.storage.files import FileStorage
from forestage.storage.hicache import HicacheFileStorage
from forestage.storage.leftovers import OLD_S, new_temporary, sweep
from forestage.storage.shelf import CHUNK_BYTES

MODEL, PAGES = hybrid(), keys(3)
TESTS = Path(__file__).parents[1]
PATHS = os.pathsep.join(map(str, (TESTS, TESTS.parent / "service", TESTS.parent / "client")))


def lay(path: Path, age_s: float) -> Path:
    path.write_bytes(b"half of a page")
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


def folder_of(storage: DirectoryStorage) -> Path:
    return Path(storage.shelves(MODEL)[KV].paths(PAGES[0])[0]).parent


@pytest.mark.parametrize("kind", [FileStorage, HicacheFileStorage])
async def test_only_old_files_of_our_own_naming_are_removed_at_open(
    tmp_path: Path, kind: type[FileStorage | HicacheFileStorage]
) -> None:
    root = tmp_path / "l3"
    root.mkdir()
    first = kind(root)
    await store(first, MODEL, KV, *PAGES)
    await first.aclose()
    folder = folder_of(first)
    ours = [lay(Path(new_temporary(str(folder))), OLD_S + 60) for _ in range(5)]
    fresh = lay(Path(new_temporary(str(folder))), OLD_S - 60)
    name = Path(new_temporary(str(folder))).name
    foreign = [
        lay(folder / other, 10 * OLD_S)
        for other in (f"{name}.x", name[1:], f".{'0' * 32}.tmp", ".x.tmp", "a.bin.123.tmp", name.upper())
    ]
    linked, directory = (Path(new_temporary(str(folder))) for _ in range(2))
    os.symlink(foreign[0], linked)
    os.mkdir(directory)
    os.utime(directory, (0, 0))
    storage = kind(root)
    await storage.open()
    await until(lambda: not any(path.exists() for path in ours))
    await storage.aclose()
    storage.check_integrity()
    assert all(path.exists() for path in (fresh, *foreign, linked, directory))
    again = kind(root)
    assert await Landing(MODEL, KV, PAGES).read(again) == [LOADED] * 3
    await again.aclose()


async def test_a_root_that_is_not_there_is_nothing_to_sweep(tmp_path: Path) -> None:
    storage = HicacheFileStorage(tmp_path / "none")
    await storage.open()
    await storage.aclose()
    assert sweep([str(tmp_path / "none")], time.time(), threading.Event()) == 0


def test_a_sweep_can_be_stopped(tmp_path: Path) -> None:
    old = lay(Path(new_temporary(str(tmp_path))), OLD_S + 60)
    stop = threading.Event()
    stop.set()
    assert sweep([str(tmp_path)], time.time(), stop) == 0
    assert old.exists()
    assert sweep([str(tmp_path / "none"), str(tmp_path)], time.time(), threading.Event()) == 1
    assert not old.exists()


async def test_what_a_killed_writer_left_is_what_is_swept(tmp_path: Path) -> None:
    """A write that is cut off leaves a temporary name, and that name is one that the sweep knows."""
    root = str(tmp_path / "l3")
    died = await asyncio.create_subprocess_exec(sys.executable, __file__, root, env=os.environ | {"PYTHONPATH": PATHS})
    assert await died.wait() == -signal.SIGKILL
    (left,) = (os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names)
    assert os.stat(left).st_size == CHUNK_BYTES
    os.utime(left, (0, 0))
    storage = FileStorage(root)
    await storage.open()
    await until(lambda: not os.path.exists(left))
    await storage.aclose()


class _DieAtTheSecondLook(threading.Event):
    looks = 0

    def is_set(self) -> bool:
        self.looks += 1
        if self.looks == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return False


if __name__ == "__main__":
    BIG = ModelLayout("big", 16, (Component("kv", 4 * CHUNK_BYTES),))
    FileStorage(sys.argv[1]).shelves(BIG)[0].write(PAGES[0], [bytes(4 * CHUNK_BYTES)], _DieAtTheSecondLook())
