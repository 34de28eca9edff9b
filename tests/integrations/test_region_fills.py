"""Memory of an engine that the service fills, from the adapter's side, against a service in a process of its own."""

import hashlib
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from forestage_client import BadRequest, Client, Gone, Stopping, Unreachable
from forestage_client._memory import address_of
from forestage_client._memory_region import MemoryRegion, RegionTarget
from forestage_client.integrations._host_pages import BytesPage, HostPage, RunsPage
from forestage_client.integrations._sglang_settings import Rank, Settings
from forestage_client.integrations._shared_store import SharedStore
from support.configs import write_config
from support.region_memory import Memory, memory_of
from support.running import Running, running

KEYS = [hashlib.sha256(b"%d" % page).hexdigest() for page in range(12)]
PAGES = [bytes((page * 7 + at) % 251 for at in range(4096)) for page in range(12)]
HALF = 2048


@dataclass
class Allocator:
    """What SGLang's shared-memory allocator keeps of its memory: descriptors and mappings."""

    fds: list[int]
    mms: list[mmap.mmap]


@dataclass
class HostPool:
    """What the adapter looks at of SGLang's host pool."""

    allocator: object


@dataclass
class Slots:
    """Slots of two runs a page, in two files: the first halves of all, and the second halves in reverse order."""

    memory: Memory
    pool: HostPool = field(init=False)

    def __post_init__(self) -> None:
        self.pool = HostPool(Allocator(self.memory.fds, self.memory.maps))

    def pages(self, count: int) -> list[HostPage]:
        first, second = (address_of(memoryview(mapping)) for mapping in self.memory.maps)
        runs = [((first + page * HALF, HALF), (second + (11 - page) * HALF, HALF)) for page in range(count)]
        return [RunsPage(pair, 4096, self.memory) for pair in runs]

    def got(self, page: int) -> bytes:
        first, second = self.memory.maps
        return first[page * HALF : (page + 1) * HALF] + second[(11 - page) * HALF : (12 - page) * HALF]


def configure(folder: Path, *, fills: bool = True) -> Path:
    server = f'port = 0\nuds = "{folder}/s"' + (f'\nregions_uds = "{folder}/r"' if fills else "")
    return write_config(folder, server=server)


@contextmanager
def opened(folder: Path) -> Iterator[SharedStore]:
    store = SharedStore(Settings(f"unix:{folder}/s", "m", Rank(0, 1)))
    try:
        yield store
    finally:
        store.close()


@contextmanager
def slots() -> Iterator[Slots]:
    with memory_of(12 * HALF, 12 * HALF) as memory:
        yield Slots(memory)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets an entry for each page that this process copies."""
    made: list[int] = []
    fill = RunsPage.fill

    def counted(page: RunsPage, source: int) -> None:
        made.append(source)
        fill(page, source)

    monkeypatch.setattr(RunsPage, "fill", counted)
    return made


def put(store: SharedStore) -> None:
    assert store.write(KEYS, {"kv": {page: BytesPage(bytearray(PAGES[page])) for page in range(12)}}, {}) == 12


def bring(store: SharedStore, target: Slots, pool: object, count: int = 12) -> tuple[int, list[bool]]:
    return store.bring(KEYS[:count], store.attach().components["kv"], target.pages(count), pool)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("fills", [True, False], ids=["filled", "copied"])
def test_pages_come_into_the_slots(tmp_path: Path, fills: bool, copies: list[int]) -> None:
    with running(configure(tmp_path, fills=fills)), opened(tmp_path) as store, slots() as target:
        put(store)
        assert bring(store, target, target.pool, 5) == (5, [True] * 5)
        assert [target.got(page) for page in range(5)] == PAGES[:5]
        assert target.got(5) == b"\xee" * 4096
        assert bring(store, target, target.pool) == (12, [True] * 12)
        assert [target.got(page) for page in range(12)] == PAGES
        assert len(copies) == (0 if fills else 17)
        # Not in memory that was registered, or not in runs: copied.
        for pool in (None, HostPool(None), HostPool(Allocator([], []))):
            copies.clear()
            assert bring(store, target, pool, 3) == (3, [True] * 3)
            assert len(copies) == 3
        with memory_of(12 * HALF, 12 * HALF) as other:
            copies.clear()
            assert bring(store, Slots(other), target.pool, 3) == (3, [True] * 3)
            assert len(copies) == 3
        assert store.bring([*KEYS[:2], "ab" * 32], store.attach().components["kv"], target.pages(3), target.pool) == (
            2,
            [True, True, False],
        )


def test_memory_that_is_not_taken_is_copied_to(tmp_path: Path, copies: list[int]) -> None:
    with running(configure(tmp_path)), opened(tmp_path) as store, slots() as target:
        put(store)
        os.truncate(target.memory.fds[1], 12 * HALF + 8192)  # a hole at the end
        assert bring(store, target, target.pool) == (12, [True] * 12)
        assert len(copies) == 12
        assert [target.got(page) for page in range(12)] == PAGES


def test_a_service_that_comes_back_fills_again(tmp_path: Path, copies: list[int]) -> None:
    config = configure(tmp_path)
    with opened(tmp_path) as store, slots() as target:
        with running(config) as service:
            put(store)
            assert bring(store, target, target.pool) == (12, [True] * 12)
            service.stop(signal.SIGKILL)
        with running(config):
            until(lambda: _filled_again(store, target, copies))
            assert [target.got(page) for page in range(12)] == PAGES


def _filled_again(store: SharedStore, target: Slots, copies: list[int]) -> bool:
    copies.clear()
    try:
        return bring(store, target, target.pool) == (12, [True] * 12) and not copies
    except Exception:  # the adapter answers whatever it is with a miss
        return False


def test_a_region_of_one_client(tmp_path: Path) -> None:
    url, targets = f"unix:{tmp_path}/s", {"kv": RegionTarget([4096], [0, 8192, 4096])}
    with running(configure(tmp_path)) as service, opened(tmp_path) as store, memory_of(3 * 4096) as memory:
        put(store)
        with pytest.raises(BadRequest, match="no file in shared memory"):
            MemoryRegion(url, f"{tmp_path}/r", [0])
        with pytest.raises(Unreachable):
            MemoryRegion(url, f"{tmp_path}/nowhere", memory.fds)
        with pytest.raises(ValueError, match="unix socket only"):
            MemoryRegion(service.url, f"{tmp_path}/r", memory.fds)
        region = MemoryRegion(url, f"{tmp_path}/r", memory.fds)
        assert region.size == 3 * 4096
        filled = region.fill("m", KEYS[:3], targets, deadline_ms=5000)
        assert (filled.outcome, filled.pages.ready, filled.filled) == ("complete", 3, {"kv": range(3)})
        assert memory.bytes() == PAGES[0] + PAGES[2] + PAGES[1]
        with pytest.raises(BadRequest, match="overlap"):
            region.fill("m", KEYS[:2], {"kv": RegionTarget([4096], [0, 1])})
        os.truncate(memory.fds[0], 8192)
        with pytest.raises(Gone, match="shortened"):
            region.fill("m", KEYS[:3], targets)
        region.close()
        assert service.stop() == 0


_CHILD = """
import os, sys
from forestage_client._memory_region import MemoryRegion, RegionTarget
home, pages, *keys = sys.argv[1:]
fd = os.memfd_create("slots")
os.write(fd, bytes(int(pages) * 65536))
region = MemoryRegion(f"unix:{home}/s", f"{home}/r", [fd])
target = RegionTarget([4096] * 16, [at * 4096 for at in range(int(pages) * 16)])
print("registered", flush=True)
while True:
    assert len(region.fill("m", keys, {"kv": target}).filled["kv"]) == int(pages)
"""


@contextmanager
def big_pages(folder: Path, count: int) -> Iterator[tuple[Running, list[str]]]:
    """Run a service with so many resident pages of 64 KiB."""
    server = f'port = 0\nuds = "{folder}/s"\nregions_uds = "{folder}/r"'
    keys = [hashlib.sha256(b"big %d" % page).hexdigest() for page in range(count)]
    config = write_config(folder, slots=256, page_bytes=65536, server=server)
    with running(config) as service, opened(folder) as store:
        pages: dict[int, HostPage] = {page: BytesPage(bytearray(65536)) for page in range(count)}
        assert store.write(keys, {"kv": pages}, {}) == count
        yield service, keys


def test_clients_that_are_killed_in_the_middle_of_fills(tmp_path: Path) -> None:
    """Whatever moment the kill comes at, nothing of it is left in the service."""
    with big_pages(tmp_path, 128) as (service, keys), Client(f"unix:{tmp_path}/s") as client:
        descriptors = Path(f"/proc/{service.process.pid}/fd")

        def memory_files() -> int:
            return sum("memfd:slots" in _link(entry) for entry in descriptors.iterdir())

        for delay_s in (0.0, 0.003, 0.01, 0.02):
            command = [sys.executable, "-c", _CHILD, str(tmp_path), "128", *keys]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout is not None
                assert child.stdout.readline() == "registered\n"
                assert memory_files() == 1
                time.sleep(delay_s)  # no state is waited for: any moment will do
                child.kill()
            until(lambda: memory_files() == 0)
            until(lambda: not client.status()["leases"] and not any(client.status()["jobs"].values()))
        assert service.stop() == 0


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_nothing_is_written_after_a_service_that_ended(tmp_path: Path, signum: signal.Signals) -> None:
    count = 128
    with big_pages(tmp_path, count) as (service, keys), memory_of(count * 65536) as memory:
        region = MemoryRegion(f"unix:{tmp_path}/s", f"{tmp_path}/r", memory.fds)
        target = {"kv": RegionTarget([4096] * 16, [at * 4096 for at in range(count * 16)])}
        assert region.fill("m", keys, target).filled == {"kv": range(count)}
        ending = threading.Timer(0.2, service.process.send_signal, (signum,))
        ending.start()
        mapping = memory.maps[0]
        done: list[int] = []
        with pytest.raises((Unreachable, Stopping, Gone)):
            _fill_for_ever(region, keys, target, done)
        mapping[:] = b"\xaa" * len(mapping)  # the pages are zeros
        ending.join()
        service.process.wait(20)
        assert done
        assert mapping[:] == b"\xaa" * len(mapping)
        region.close()


def _fill_for_ever(region: MemoryRegion, keys: list[str], target: dict[str, RegionTarget], done: list[int]) -> None:
    while True:
        done.append(len(region.fill("m", keys, target).filled["kv"]))


def _link(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except OSError:
        return ""
