"""The wrapper of every storage: bounded probes, stalls, the breaker, exact reports, counts."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from contract.polling import until
from contract.storage_contract import Landing, hybrid, keys, store
from forestage.core.breaker import Breaker
from forestage.core.errors import StartError, StorageUnavailableError
from forestage.core.layout import ModelLayout
from forestage.storage.base import PageRead, Probe, ReadOutcome, Report
from forestage.storage.memory import MemoryStorage
from forestage.storage.wrap import FaultyStorage, GuardedStorage

MODEL, PAGES = hybrid(), keys(5)
QUESTION = Probe(PAGES, 0, 0, bytes(5))
LOADED, MISSING, UNREACHABLE, STALLED = (
    ReadOutcome.LOADED,
    ReadOutcome.MISSING,
    ReadOutcome.UNREACHABLE,
    ReadOutcome.STALLED,
)


class Counts:
    """An observer that adds up."""

    def __init__(self) -> None:
        self.pages = self.num_bytes = self.batches = 0
        self.seconds = 0.0
        self.errors: Counter[str] = Counter()
        self.ups: list[bool] = []

    def storage_read(self, pages: int, num_bytes: int, seconds: float) -> None:
        self.batches += 1
        self.pages += pages
        self.num_bytes += num_bytes
        self.seconds += seconds

    def storage_error(self, kind: str, count: int) -> None:
        self.errors[str(kind)] += count

    def storage_up(self, is_up: bool) -> None:
        self.ups.append(is_up)


class Guard:
    """A guarded, faulty storage in memory with a clock of its own for the breaker."""

    def __init__(self, inner: FaultyStorage, stall_timeout_s: float = 0.08) -> None:
        self.now = 1000.0
        self.faulty = inner
        self.counts = Counts()
        self.storage = GuardedStorage(
            inner,
            probe_timeout_s=0.05,
            stall_timeout_s=stall_timeout_s,
            breaker=Breaker(max_failures=2, backoff_s=1.0, backoff_cap_s=4.0),
            observe=self.counts,
            clock=lambda: self.now,
        )

    async def read(self, pages: list[bytes] = PAGES) -> list[ReadOutcome]:
        return await Landing(MODEL, 0, pages).read(self.storage)

    async def probe(self) -> bool:
        try:
            await self.storage.probe(MODEL, QUESTION)
        except StorageUnavailableError:
            return False
        return True


async def guarded() -> Guard:
    guard = Guard(FaultyStorage(MemoryStorage()))
    await store(guard.storage, MODEL, 0, *PAGES)
    return guard


# ---- probes


async def test_a_hanging_probe_is_unavailable_in_time() -> None:
    guard = await guarded()
    guard.faulty.hang_probes()
    began = asyncio.get_running_loop().time()
    with pytest.raises(StorageUnavailableError, match="timed out"):
        await guard.storage.probe(MODEL, QUESTION)
    assert 0.04 < asyncio.get_running_loop().time() - began < 1
    assert guard.counts.errors == {"probe": 1}
    assert not guard.storage.is_up()


async def test_an_open_breaker_refuses_at_once_and_closes_by_itself() -> None:
    guard = await guarded()
    guard.faulty.refuse_probes = True
    assert [await guard.probe() for _ in range(5)] == [False] * 5
    assert guard.faulty.probes == 2
    with pytest.raises(StorageUnavailableError, match="breaker is open") as raised:
        await guard.storage.probe(MODEL, QUESTION)
    assert raised.value.retry_after_s == pytest.approx(1.0)
    assert await guard.read() == [UNREACHABLE] * 5
    with pytest.raises(StorageUnavailableError):
        await store(guard.storage, MODEL, 0, PAGES[0])
    with pytest.raises(StorageUnavailableError):
        await guard.storage.delete(MODEL, 0, PAGES[0])
    assert guard.faulty.log == []
    guard.now += 1.0
    assert not await guard.probe()  # the trial
    assert guard.faulty.probes == 3
    guard.faulty.refuse_probes = False
    guard.now += 1.9
    assert not await guard.probe()
    guard.now += 0.1
    assert await guard.probe()
    assert await guard.read() == [LOADED] * 5
    assert guard.counts.ups == [False, True]


async def test_one_trial_at_a_time_and_a_cancelled_one_makes_room() -> None:
    guard = await guarded()
    guard.faulty.refuse_probes = True
    for _ in range(2):
        assert not await guard.probe()
    guard.faulty.refuse_probes = False
    guard.faulty.hang_probes()
    guard.now += 1.0
    trial = asyncio.create_task(guard.storage.probe(MODEL, QUESTION))
    await until(lambda: guard.faulty.probes == 3)
    assert not await guard.probe()
    assert guard.faulty.probes == 3
    trial.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trial
    guard.faulty.release()
    assert await guard.probe()
    assert guard.storage.is_up()


async def test_an_unexpected_exception_of_a_probe_is_unavailable() -> None:
    guard = await guarded()

    async def fail(model: ModelLayout, probe: Probe) -> None:
        raise OSError(5, "Input/output error")

    guard.faulty.probe = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(StorageUnavailableError, match="Input/output"):
        await guard.storage.probe(MODEL, QUESTION)


# ---- what counts as a failure of the storage


@pytest.mark.parametrize("outcome", [MISSING, ReadOutcome.CORRUPT, ReadOutcome.ERROR])
async def test_trouble_with_pages_never_opens_the_breaker(outcome: ReadOutcome) -> None:
    guard = await guarded()
    guard.faulty.fault(outcome=outcome)
    for _ in range(10):
        assert await guard.read() == [outcome] * 5
    assert guard.storage.is_up()
    assert guard.counts.errors == {outcome: 50}


async def test_failing_writes_never_open_the_breaker() -> None:
    guard = await guarded()
    for error in (OSError(28, "No space left on device"), StorageUnavailableError("read only")):
        guard.faulty.write_error = error
        for _ in range(5):
            with pytest.raises(type(error)):
                await store(guard.storage, MODEL, 0, PAGES[0])
    assert guard.counts.errors == {"write": 10}
    assert await guard.read() == [LOADED] * 5


async def test_a_hanging_write_is_given_up_and_lasts_until_its_buffers_are_free() -> None:
    guard = await guarded()
    guard.faulty.hang_writes()
    writing = asyncio.create_task(store(guard.storage, MODEL, 0, PAGES[0]))
    await asyncio.sleep(0.3)  # its time is 0.08 s and some for 8 KiB
    assert not writing.done()
    assert guard.faulty.open_writes == 1
    assert await guard.read() == [LOADED] * 5
    guard.faulty.release()
    with pytest.raises(StorageUnavailableError, match=r"^memory: a write took more than 0\.1 s$"):
        await writing
    assert guard.faulty.open_writes == 0
    assert guard.counts.errors == {"write": 1}
    assert guard.storage.is_up()
    await store(guard.storage, MODEL, 0, PAGES[0])


async def test_a_cancelled_write_that_hangs_is_cancelled_once_its_buffers_are_free() -> None:
    guard = await guarded()
    guard.faulty.hang_writes()
    writing = asyncio.create_task(store(guard.storage, MODEL, 0, PAGES[0]))
    await until(lambda: guard.faulty.open_writes == 1)
    for _ in range(3):
        writing.cancel()
        await asyncio.sleep(0.01)
    assert not writing.done()
    guard.faulty.release()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert guard.counts.errors == {}


async def test_an_error_of_the_system_is_not_taken_for_a_write_given_up() -> None:
    guard = await guarded()
    guard.faulty.write_error = TimeoutError(110, "Connection timed out")
    with pytest.raises(TimeoutError, match="Connection timed out"):
        await store(guard.storage, MODEL, 0, PAGES[0])


async def test_unreachable_reads_open_it_and_answered_probes_alone_do_not_vouch_for_reads() -> None:
    guard = await guarded()
    guard.faulty.fault(outcome=UNREACHABLE)
    for _ in range(4):
        await guard.probe()
        assert await guard.read() == [UNREACHABLE] * 5
    assert len(guard.faulty.log) == 10  # two batches, then the breaker
    guard.now += 1.0
    assert await guard.probe()
    assert not guard.storage.is_up()
    assert await guard.read() == [UNREACHABLE] * 5  # on probation: one failure opens it again
    assert not await guard.probe()
    guard.faulty.fault()
    guard.now += 2.0
    assert await guard.probe()
    assert await asyncio.gather(*(guard.read() for _ in range(3))) == [[LOADED] * 5] * 3  # no page lost to a trial
    assert guard.counts.ups == [False, True]


async def test_after_a_while_without_reads_a_probe_is_believed() -> None:
    guard = await guarded()
    guard.faulty.fault(outcome=UNREACHABLE)
    await guard.read()
    assert not guard.storage.is_up()
    guard.now += 10
    await guard.probe()
    assert not guard.storage.is_up()
    guard.now += 31
    await guard.probe()
    assert guard.storage.is_up()


async def test_a_read_can_be_the_trial() -> None:
    guard = await guarded()
    guard.faulty.refuse_probes = True
    for _ in range(2):
        await guard.probe()
    guard.now += 1.0
    assert await guard.read(keys(2, "unknown")) == [MISSING] * 2  # no verdict, so the next may try
    assert await guard.read() == [LOADED] * 5
    assert guard.storage.is_up()


# ---- reports


async def test_counts_pages_and_bytes() -> None:
    guard = await guarded()
    await guard.storage.delete(MODEL, 0, PAGES[1])
    assert await guard.read() == [LOADED, MISSING, LOADED, LOADED, LOADED]
    assert await guard.read([]) == []
    assert (guard.counts.batches, guard.counts.pages, guard.counts.num_bytes) == (1, 4, 4 * 2 * 4096)
    assert guard.counts.errors == {"missing": 1}


class Sloppy(MemoryStorage):
    """Reports twice, forgets some, raises at the end."""

    error: Exception | None = None

    async def read_into(self, model: ModelLayout, reads: Sequence[PageRead], report: Report) -> None:
        report(0, MISSING)
        report(0, LOADED)
        report(2, ReadOutcome.CORRUPT)
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("error", "rest"),
    [(None, ReadOutcome.ERROR), (OSError("x"), ReadOutcome.ERROR), (StorageUnavailableError("x"), UNREACHABLE)],
)
async def test_each_page_is_reported_once_whatever_the_storage_does(error: Exception | None, rest: ReadOutcome) -> None:
    inner = Sloppy()
    inner.error = error
    storage = GuardedStorage(inner, probe_timeout_s=1, stall_timeout_s=1, breaker=Breaker())
    landing = Landing(MODEL, 0, PAGES)
    await storage.read_into(MODEL, landing.reads, landing.report)
    assert landing.outcomes() == [MISSING, rest, ReadOutcome.CORRUPT, rest, rest]


# ---- stalls


async def test_a_stalled_batch_is_given_up_but_awaited_and_late_reports_are_swallowed() -> None:
    guard = await guarded()
    guard.faulty.fault(key=PAGES[2], hold=True)
    landing = Landing(MODEL, 0, PAGES)
    reading = asyncio.create_task(guard.storage.read_into(MODEL, landing.reads, landing.report))
    await until(lambda: len(landing.reports) == 5)
    assert landing.outcomes() == [LOADED, LOADED, STALLED, STALLED, STALLED]
    assert all(read.stopped for read in landing.reads)
    assert guard.faulty.stalls == 1
    assert guard.counts.errors == {"stalled": 3}
    assert not guard.storage.is_up()
    assert not reading.done()
    reading.cancel()
    await asyncio.sleep(0)
    assert not reading.done()
    guard.faulty.release()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert len(landing.reports) == 5
    assert guard.counts.errors == {"stalled": 3}
    assert guard.counts.pages == 2


async def test_stalls_open_the_breaker() -> None:
    guard = await guarded()
    guard.faulty.fault(hold=True)
    landings = [Landing(MODEL, 0, PAGES) for _ in range(2)]
    reading = [
        asyncio.create_task(guard.storage.read_into(MODEL, landing.reads, landing.report)) for landing in landings
    ]
    await until(lambda: all(len(landing.reports) == 5 for landing in landings))
    assert not await guard.probe()
    assert guard.faulty.probes == 0
    guard.faulty.release()
    await asyncio.gather(*reading)
    guard.now += 1.0
    assert await guard.read() == [LOADED] * 5


async def test_slow_is_not_stalled() -> None:
    guard = await guarded()
    guard.faulty.fault(delay_s=0.03)
    began = asyncio.get_running_loop().time()
    assert await guard.read([*PAGES, *PAGES]) == [LOADED] * 10
    assert asyncio.get_running_loop().time() - began > 2 * 0.1  # longer than the timeout with all its slack
    assert guard.faulty.stalls == 0


class OneByOne(MemoryStorage):
    """Reads one batch at a time, page by page, slowly; the others wait for their turn."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = asyncio.Lock()

    async def read_into(self, model: ModelLayout, reads: Sequence[PageRead], report: Report) -> None:
        async with self.turn:
            for index, read in enumerate(reads):
                await asyncio.sleep(0.02)
                read.progress += 1
                report(index, MISSING)


async def test_waiting_for_others_that_move_is_not_stalled() -> None:
    inner = OneByOne()
    storage = GuardedStorage(inner, probe_timeout_s=1, stall_timeout_s=0.08, breaker=Breaker())
    landings = [Landing(MODEL, 0, PAGES) for _ in range(4)]
    outcomes = await asyncio.gather(*(landing.read(storage) for landing in landings))
    assert outcomes == [[MISSING] * 5] * 4


async def test_waiting_for_one_that_hangs_is_stalled_too() -> None:
    inner = OneByOne()
    storage = GuardedStorage(inner, probe_timeout_s=1, stall_timeout_s=0.08, breaker=Breaker())
    await inner.turn.acquire()
    landings = [Landing(MODEL, 0, PAGES) for _ in range(2)]
    reading = [asyncio.create_task(storage.read_into(MODEL, landing.reads, landing.report)) for landing in landings]
    await until(lambda: all(len(landing.reports) == 5 for landing in landings))
    assert [landing.outcomes() for landing in landings] == [[STALLED] * 5] * 2
    inner.turn.release()
    await asyncio.gather(*reading)


class Replacing(MemoryStorage):
    """Has one thread, which hangs in its first batch; another takes its place a while after it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.hung: Sequence[PageRead] | None = None
        self.replaced, self.released = asyncio.Event(), asyncio.Event()

    async def read_into(self, model: ModelLayout, reads: Sequence[PageRead], report: Report) -> None:
        if self.hung is None:
            self.hung = reads
            reads[0].progress += 1
            await self.released.wait()
            return
        await self.replaced.wait()
        for index in range(len(reads)):
            report(index, MISSING)

    def stalled(self, reads: Sequence[PageRead]) -> None:
        assert reads is self.hung
        asyncio.get_running_loop().call_later(0.03, self.replaced.set)


async def test_what_waited_behind_a_stalled_batch_gets_the_whole_timeout_anew() -> None:
    inner = Replacing()
    storage = GuardedStorage(inner, probe_timeout_s=1, stall_timeout_s=0.08, breaker=Breaker())
    hung, waiting = Landing(MODEL, 0, PAGES), Landing(MODEL, 0, PAGES)
    reading = asyncio.create_task(storage.read_into(MODEL, hung.reads, hung.report))
    await asyncio.sleep(0)
    assert await waiting.read(storage) == [MISSING] * 5
    assert hung.outcomes() == [STALLED] * 5
    inner.released.set()
    await reading


# ---- opening


class Opening(MemoryStorage):
    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error

    async def open(self) -> None:
        if self.error is None:
            await asyncio.Event().wait()
        else:
            raise self.error


@pytest.mark.parametrize("error", [None, StorageUnavailableError("not there yet")])
async def test_a_storage_that_is_not_there_yet_does_not_stop_the_start(error: Exception | None) -> None:
    storage = GuardedStorage(Opening(error), probe_timeout_s=0.05, stall_timeout_s=1, breaker=Breaker())
    await storage.open()
    assert not storage.is_up()


async def test_what_an_operator_must_change_does() -> None:
    inner = Opening(StartError("storage.file.root: cannot make it"))
    storage = GuardedStorage(inner, probe_timeout_s=1, stall_timeout_s=1, breaker=Breaker())
    with pytest.raises(StartError):
        await storage.open()


async def test_takes_kind_and_sizes_of_the_storage() -> None:
    inner = MemoryStorage()
    inner.batch_bytes, inner.batches_in_flight = 12345, 7
    storage = GuardedStorage(inner, probe_timeout_s=1, stall_timeout_s=1, breaker=Breaker())
    assert (storage.kind, storage.batch_bytes, storage.batches_in_flight) == ("memory", 12345, 7)
