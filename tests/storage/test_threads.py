"""Threads that survive hanging jobs."""

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import partial

import pytest
import pytest_asyncio

from contract.polling import until
from forestage.core.errors import StorageUnavailableError
from forestage.storage.threads import Job, Threads


def nothing() -> None:
    """Be asked to end soon, and have nothing to do for it."""


class Gate:
    """Work that hangs until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        self.opened.wait()
        return "through"


@pytest_asyncio.fixture
async def threads() -> AsyncIterator[Threads]:
    threads = Threads("test", 2, spares=2)
    yield threads
    threads.check_integrity()
    threads.close()
    await until(lambda: threads.alive == 0)


@pytest_asyncio.fixture
async def gate() -> AsyncIterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


async def test_runs_work_and_returns_its_result(threads: Threads) -> None:
    assert await threads.submit(threading.current_thread).wait() is not threading.current_thread()
    jobs = [threads.submit(partial(pow, number, 2)) for number in range(50)]
    assert [await job.wait() for job in jobs] == [number**2 for number in range(50)]
    assert threads.alive <= 2


@pytest.mark.parametrize("error", [OSError("disk"), SystemExit(3)])
async def test_hands_on_what_the_work_raised_and_lives(threads: Threads, error: BaseException) -> None:
    def work() -> None:
        raise error

    with pytest.raises(type(error)):
        await threads.submit(work).wait()
    assert await threads.submit(lambda: 1).wait() == 1


async def test_a_cancelled_wait_leaves_the_job(threads: Threads, gate: Gate) -> None:
    job = threads.submit(gate)
    waiting = asyncio.create_task(job.wait())
    await until(gate.entered.is_set)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.opened.set()
    assert await job.wait() == "through"


async def test_outlast_waits_for_the_end_however_often_it_is_cancelled(threads: Threads, gate: Gate) -> None:
    asked: list[bool] = []
    job = threads.submit(gate)
    outlasting = asyncio.create_task(job.outlast(lambda: asked.append(True)))
    await until(gate.entered.is_set)
    for _ in range(3):
        outlasting.cancel()
        await asyncio.sleep(0)
    assert not outlasting.done()
    gate.opened.set()
    with pytest.raises(asyncio.CancelledError):
        await outlasting
    assert job.ended.done()
    assert asked == [True]


async def test_a_withdrawn_job_never_runs(threads: Threads) -> None:
    gates = [Gate(), Gate()]
    running = [threads.submit(gate) for gate in gates]
    ran: list[bool] = []
    job: Job[None] = threads.submit(lambda: ran.append(True))
    await until(lambda: all(gate.entered.is_set() for gate in gates))
    assert threads.withdraw(job)
    assert not threads.withdraw(job)
    assert not threads.withdraw(running[0])
    with pytest.raises(StorageUnavailableError):
        await job.wait()
    assert job.is_withdrawn
    for gate, held in zip(gates, running, strict=True):
        gate.opened.set()
        await held.wait()
    assert await threads.submit(lambda: 1).wait() == 1
    assert not ran


async def test_hung_threads_are_replaced_up_to_the_spares_and_shrink_again(threads: Threads) -> None:
    gates = [Gate() for _ in range(4)]
    hung = []
    for gate in gates:
        hung.append(threads.submit(gate))
        await until(gate.entered.is_set)  # there is a thread for it, since those before it count as hung
        threads.replace_stalled(hung[-1])
        threads.replace_stalled(hung[-1])  # told twice, believed once
        threads.check_integrity()
    assert threads.alive == threads.stalled == 4
    queued = threads.submit(lambda: "ran")
    assert threads.alive == 4  # the limit
    gates[0].opened.set()
    assert await queued.wait() == "ran"
    for gate, job in zip(gates, hung, strict=True):
        gate.opened.set()
        assert await job.wait() == "through"
    await until(lambda: threads.alive <= 2)
    assert threads.stalled == 0
    assert await asyncio.gather(*(threads.submit(lambda: 1).wait() for _ in range(9))) == [1] * 9


async def test_close_waits_for_no_hung_thread_and_takes_back_the_queue(gate: Gate) -> None:
    threads = Threads("test", 1)
    hung = threads.submit(gate)
    queued = threads.submit(lambda: 1)
    await until(gate.entered.is_set)
    threads.close()
    threads.close()
    with pytest.raises(StorageUnavailableError):
        await queued.wait()
    with pytest.raises(StorageUnavailableError):
        threads.submit(lambda: 1)
    assert threads.alive == 1
    gate.opened.set()
    assert await hung.wait() == "through"
    await until(lambda: threads.alive == 0)


def test_a_thread_that_comes_back_after_its_loop_has_closed_ends_quietly() -> None:
    gate = Gate()
    threads = Threads("test", 1)

    async def leave() -> None:
        threads.submit(gate)
        await until(gate.entered.is_set)

    asyncio.run(leave())
    threads.close()
    gate.opened.set()
    asyncio.run(until(lambda: threads.alive == 0))


async def test_threads_start_only_when_needed(threads: Threads) -> None:
    for _ in range(20):
        await threads.submit(lambda: 1).wait()
    assert threads.alive == 1
    await asyncio.gather(*(threads.submit(lambda: 1).outlast(nothing) for _ in range(20)))
    assert threads.alive <= 2
