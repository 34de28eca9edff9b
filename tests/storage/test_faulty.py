"""The storage with injected faults does what it is told, and keeps the promise about buffers."""

import asyncio

import pytest

from contract.polling import until
from contract.storage_contract import Landing, hybrid, keys, payloads, store
from forestage.core.errors import StorageUnavailableError
from forestage.storage.base import Probe, ReadOutcome
from forestage.storage.memory import MemoryStorage
from forestage.storage.wrap import FaultyStorage

MODEL, PAGES = hybrid(), keys(5)
LOADED, STOPPED = ReadOutcome.LOADED, ReadOutcome.STOPPED


async def stored() -> FaultyStorage:
    storage = FaultyStorage(MemoryStorage())
    await store(storage, MODEL, 0, *PAGES)
    await store(storage, MODEL, 1, *PAGES)
    return storage


async def test_counts_and_logs_reads() -> None:
    storage = await stored()
    await Landing(MODEL, 0, PAGES).read(storage)
    await Landing(MODEL, 0, PAGES[2:3]).read(storage)
    assert storage.log == [(0, key) for key in [*PAGES, PAGES[2]]]
    assert storage.reads[0, PAGES[2]] == 2
    assert storage.reads[1, PAGES[2]] == 0
    assert storage.open_reads == 0


async def test_the_most_exact_fault_counts() -> None:
    storage = await stored()
    storage.fault(outcome=ReadOutcome.ERROR)
    storage.fault(key=PAGES[1], outcome=ReadOutcome.CORRUPT)
    storage.fault(1, outcome=ReadOutcome.MISSING)
    storage.fault(1, PAGES[2])
    assert await Landing(MODEL, 0, PAGES[:2]).read(storage) == [ReadOutcome.ERROR, ReadOutcome.CORRUPT]
    assert await Landing(MODEL, 1, PAGES[:3]).read(storage) == [ReadOutcome.MISSING, ReadOutcome.CORRUPT, LOADED]
    storage.fault()
    assert await Landing(MODEL, 1, PAGES).read(storage) == [LOADED] * 5


async def test_a_held_read_outlasts_stop_and_cancellation_and_then_still_writes() -> None:
    storage = await stored()
    storage.fault(key=PAGES[1], hold=True)
    landing = Landing(MODEL, 0, PAGES)
    reading = asyncio.create_task(storage.read_into(MODEL, landing.reads, landing.report))
    await until(lambda: storage.open_reads == 1 and len(landing.reports) == 1)
    for read in landing.reads:
        read.stopped = True
    for _ in range(3):
        reading.cancel()
        await asyncio.sleep(0)
    assert not reading.done()
    assert storage.open_reads == 1
    storage.release()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert landing.outcomes() == [LOADED, LOADED, STOPPED, STOPPED, STOPPED]
    landing.check()
    assert storage.open_reads == 0
    assert await Landing(MODEL, 0, PAGES).read(storage) == [LOADED] * 5  # released for good


async def test_withheld_bytes_come_after_the_release() -> None:
    storage = await stored()
    storage.fault(key=PAGES[0], withheld_bytes=5000)
    landing = Landing(MODEL, 0, PAGES[:1])
    reading = asyncio.create_task(storage.read_into(MODEL, landing.reads, landing.report))
    first, second = landing.reads[0].views
    whole = payloads(MODEL, 0, PAGES[0])
    await until(lambda: bytes(first[:3192]) == whole[0][:3192])
    assert bytes(first[3192:]) == b"\xa5" * 904
    assert bytes(second) == b"\xa5" * 4096
    storage.release()
    await reading
    landing.check()


async def test_delays_are_slow_and_no_faults() -> None:
    storage = await stored()
    storage.fault(delay_s=0.01)
    began = asyncio.get_running_loop().time()
    assert await Landing(MODEL, 0, PAGES).read(storage) == [LOADED] * 5
    assert asyncio.get_running_loop().time() - began >= 0.045


async def test_probes_hang_until_released_and_can_be_cancelled() -> None:
    storage = await stored()
    question = Probe(PAGES, 0, 0, bytes(5))
    storage.hang_probes()
    given_up, patient = (asyncio.create_task(storage.probe(MODEL, question)) for _ in range(2))
    await until(lambda: storage.probes == 2)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    storage.release()
    assert (await patient).masks[0] == b"\1" * 5
    storage.refuse_probes = True
    with pytest.raises(StorageUnavailableError):
        await storage.probe(MODEL, question)


async def test_write_errors() -> None:
    storage = await stored()
    storage.write_error = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space left"):
        await store(storage, MODEL, 0, *PAGES)
    storage.write_error = None
    await store(storage, MODEL, 0, *PAGES)
