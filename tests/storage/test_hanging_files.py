"""Files that really hang, in the kernel: they hold up no probe, no other read, no write and no close."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from contract.polling import until
from contract.storage_contract import Landing, keys, payload, store
from forestage.core.breaker import Breaker
from forestage.core.errors import StorageUnavailableError
from forestage.core.layout import Component, ModelLayout
from forestage.storage.base import Probe, ReadOutcome
from forestage.storage.hicache import HicacheFileStorage
from forestage.storage.hicache_names import file_names
from forestage.storage.wrap import GuardedStorage
from storage.hanging_fs import HangingFs

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="mounts a file system over /dev/fuse"
)

MODEL, PAGES = ModelLayout("m", 16, (Component("kv", 4096),)), keys(12)
NAMES = [file_names(MODEL, 0, key)[0] for key in PAGES]
LOADED, STALLED = ReadOutcome.LOADED, ReadOutcome.STALLED


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[HangingFs]:
    files = {name: payload(MODEL, 0, key, 0) for name, key in zip(NAMES, PAGES, strict=True)}
    with HangingFs(tmp_path, files) as mounted:
        yield mounted


@pytest_asyncio.fixture
async def storage(mounted: HangingFs) -> AsyncIterator[GuardedStorage]:
    inner = HicacheFileStorage(mounted.mount, readers=2)
    yield GuardedStorage(inner, probe_timeout_s=0.4, stall_timeout_s=0.3, breaker=Breaker(max_failures=100))
    mounted.release()  # or nothing would ever end after a test that failed
    inner.check_integrity()
    await inner.aclose()


async def start(storage: GuardedStorage, pages: list[bytes]) -> tuple[Landing, asyncio.Task[None]]:
    landing = Landing(MODEL, 0, pages)
    return landing, asyncio.create_task(storage.read_into(MODEL, landing.reads, landing.report))


async def test_hung_reads_stall_their_own_batches_only(mounted: HangingFs, storage: GuardedStorage) -> None:
    mounted.hang(reads=NAMES[:2])
    hung = [await start(storage, PAGES[page : page + 3]) for page in (0, 1)]
    await until(lambda: len(mounted.waiting) == 2)  # both reading threads are in the kernel
    assert (await storage.probe(MODEL, Probe(PAGES, 0, 0, bytes(12)))).masks[0] == b"\1" * 12
    # Queued behind two threads that hang; runs as soon as those are replaced.
    assert await Landing(MODEL, 0, PAGES[4:]).read(storage) == [LOADED] * 8
    for landing, reading in hung:
        await until(lambda landing=landing: len(landing.reports) == 3)  # type: ignore[misc]
        assert landing.outcomes() == [STALLED] * 3
        assert not reading.done()
        before = bytes(landing.memory)
        reading.cancel()
        await asyncio.sleep(0.02)
        assert not reading.done()
        assert landing.memory == before
    mounted.release()
    for landing, reading in hung:
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert len(landing.reports) == 3
    assert await Landing(MODEL, 0, PAGES).read(storage) == [LOADED] * 12


async def test_when_no_thread_is_left_queued_batches_give_their_buffers_back(
    mounted: HangingFs, storage: GuardedStorage
) -> None:
    mounted.hang(reads=NAMES)
    batches = [await start(storage, [key]) for key in PAGES]
    await until(lambda: all(landing.reports for landing, _ in batches))
    assert [landing.outcomes() for landing, _ in batches] == [[STALLED]] * 12
    await until(lambda: sum(reading.done() for _, reading in batches) == 12 - len(mounted.waiting))
    assert len(mounted.waiting) == 4  # two threads and two spare ones
    mounted.release()
    await asyncio.gather(*(reading for _, reading in batches))
    assert await Landing(MODEL, 0, PAGES).read(storage) == [LOADED] * 12


async def test_hung_probes_are_abandoned_and_replaced(mounted: HangingFs, storage: GuardedStorage) -> None:
    mounted.hang(lookups=NAMES[:3])
    for page in range(3):  # more than there are probe threads
        with pytest.raises(StorageUnavailableError, match="timed out"):
            await storage.probe(MODEL, Probe([PAGES[page]], 0, 0, bytes(1)))
    assert (await storage.probe(MODEL, Probe(PAGES[3:], 0, 0, bytes(9)))).masks[0] == b"\1" * 9
    assert await Landing(MODEL, 0, PAGES[3:]).read(storage) == [LOADED] * 9
    mounted.release()
    assert (await storage.probe(MODEL, Probe(PAGES, 0, 0, bytes(12)))).masks[0] == b"\1" * 12


async def test_close_waits_for_no_hung_read(mounted: HangingFs, storage: GuardedStorage) -> None:
    mounted.hang(reads=NAMES[:1])
    landing, reading = await start(storage, PAGES[:1])
    await until(lambda: bool(mounted.waiting))
    async with asyncio.timeout(1):
        await storage.aclose()
    assert not reading.done()
    mounted.release()
    await reading
    assert landing.outcomes() in ([LOADED], [STALLED])


async def test_hung_writes_keep_their_buffers_and_delay_no_other(mounted: HangingFs, storage: GuardedStorage) -> None:
    new = keys(1, "new")
    mounted.hang(writes=True)
    hung: list[asyncio.Task[None]] = []
    while len(mounted.waiting) < 2 + 4:  # two threads and four spare ones, which are in the kernel one after the other
        writing = asyncio.create_task(store(storage, MODEL, 0, PAGES[len(hung)]))
        in_kernel = len(hung)
        await until(lambda: writing.done() or len(mounted.waiting) > in_kernel)  # noqa: B023 (within its turn)
        if writing.done():
            assert isinstance(writing.exception(), StorageUnavailableError)  # none was free in time
        else:
            hung.append(writing)
    # Now a write finds no thread; it is back in its time, with its buffers.
    with pytest.raises(StorageUnavailableError, match=r"a write took more than \d\.\d s"):
        await store(storage, MODEL, 0, new[0])
    assert not any(write.done() for write in hung)
    assert await Landing(MODEL, 0, PAGES).read(storage) == [LOADED] * 12
    mounted.release()
    for writing in hung:
        with pytest.raises(StorageUnavailableError):
            await writing
    assert not any((mounted.mount / name).exists() for name in mounted.waiting)  # the temporary names
    assert await Landing(MODEL, 0, new).read(storage) == [ReadOutcome.MISSING]
    await store(storage, MODEL, 0, *new)
    assert await Landing(MODEL, 0, [*new, *PAGES]).read(storage) == [LOADED] * 13


async def test_a_write_that_was_given_up_gets_no_name(mounted: HangingFs, storage: GuardedStorage) -> None:
    (new,) = keys(1, "new")
    mounted.hang(writes=True)
    writing = asyncio.create_task(store(storage, MODEL, 0, new))
    await until(lambda: bool(mounted.waiting))
    writing.cancel()
    await asyncio.sleep(0.02)
    assert not writing.done()  # its thread still has the buffers
    mounted.release()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert await Landing(MODEL, 0, [new, *PAGES]).read(storage) == [ReadOutcome.MISSING] + [LOADED] * 12
    assert not any((mounted.mount / name).exists() for name in mounted.waiting)
    await store(storage, MODEL, 0, new)
    assert await Landing(MODEL, 0, [new]).read(storage) == [LOADED]
