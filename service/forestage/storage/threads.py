"""A bounded set of threads for one kind of blocking work, which survives that some of them hang.

Law: working threads = alive - stalled <= size, and alive <= size + spares; a job is in exactly one of four states:
queued, running in one thread, ended, or withdrawn; it is never run after it was withdrawn.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Generic, TypeVar, cast

from forestage.core.errors import StorageUnavailableError

__all__ = ["Job", "Threads"]

T = TypeVar("T")


class _State(Enum):
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"
    WITHDRAWN = "withdrawn"


class Job(Generic[T]):
    """A piece of work handed to a thread."""

    __slots__ = ("_loop", "_waiter", "ended", "is_stalled", "result", "state", "work")

    def __init__(self, work: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self.work = work
        self.state = _State.QUEUED
        self.is_stalled = False
        #: Done when the event loop knows that the job has ended or was withdrawn. Never await it: that could cancel it.
        self.ended: asyncio.Future[None] = loop.create_future()
        self.result: T | BaseException | None = None
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_withdrawn(self) -> bool:
        """True when it never ran and never will."""
        return self.state is _State.WITHDRAWN

    async def wait(self) -> T:
        """Wait for the end and return the result; a cancelled wait leaves the job as it is. For one task at a time.

        Raises what the work raised, StorageUnavailableError when it was withdrawn.
        """
        await self._wait_for_end()
        if self.is_withdrawn:
            raise StorageUnavailableError("no thread was free before this was taken back")
        if isinstance(self.result, BaseException):
            raise self.result
        return cast("T", self.result)

    async def outlast(self, on_cancel: Callable[[], None]) -> T:
        """Wait until no thread runs this job any more, however often the caller is cancelled meanwhile.

        Returns and raises as `wait` does. The first cancellation calls `on_cancel` (which should make it end soon) and
        is raised again after the end.
        """
        try:
            return await self.wait()
        except asyncio.CancelledError:
            if not self.ended.done():
                on_cancel()
            while not self.ended.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await self._wait_for_end()
            raise

    async def _wait_for_end(self) -> None:
        if not self.ended.done():
            # A future of its own: a cancelled task cancels what it awaits.
            self._waiter = self._loop.create_future()
            await self._waiter

    def announce(self) -> None:
        """Tell the event loop that the job has ended or was withdrawn; from any thread."""
        # The loop may be gone when a thread that hung comes back: then nobody is left to be told.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self.ended.set_result(None)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Threads:
    """Daemon threads with a queue of their own. Submit on the event loop; threads start when they are needed."""

    def __init__(self, name: str, size: int, *, spares: int = 4) -> None:
        """Start no thread yet.

        Args:
            name: of the threads, for a debugger.
            size: how many may work at once.
            spares: how many more may exist while others hang.
        """
        self._name = name
        self._size = size
        self._spares = spares
        self._queue: deque[Job[Any]] = deque()
        self._changed = threading.Condition(threading.Lock())
        self._alive = 0
        self._idle = 0
        self._stalled = 0
        self._closed = False

    @property
    def alive(self) -> int:
        """How many threads exist, hung ones included."""
        return self._alive

    @property
    def stalled(self) -> int:
        """How many of them were said to hang and have not come back."""
        return self._stalled

    def submit(self, work: Callable[[], T]) -> Job[T]:
        """Queue `work` for the next free thread. Raises StorageUnavailableError after `close`."""
        job = Job(work, asyncio.get_running_loop())
        with self._changed:
            if self._closed:
                raise StorageUnavailableError("the storage is closed")
            self._queue.append(job)
            self._start_where_needed()
            self._changed.notify()
        return job

    def withdraw(self, job: Job[T]) -> bool:
        """Take back a job that no thread has begun; False when it has begun or ended."""
        with self._changed:
            if job.state is not _State.QUEUED:
                return False
            self._queue.remove(job)
            job.state = _State.WITHDRAWN
        job.announce()
        return True

    def replace_stalled(self, job: Job[T]) -> None:
        """Believe that the thread which runs `job` hangs: another one takes its place until it comes back."""
        with self._changed:
            if job.state is _State.RUNNING and not job.is_stalled:
                job.is_stalled = True
                self._stalled += 1
                self._start_where_needed()

    def close(self) -> None:
        """Withdraw what is queued and let every thread end after the job it runs. Waits for none. Idempotent."""
        with self._changed:
            self._closed = True
            dropped = list(self._queue)
            self._queue.clear()
            for job in dropped:
                job.state = _State.WITHDRAWN
            self._changed.notify_all()
        for job in dropped:
            job.announce()

    def check_integrity(self) -> None:
        """Raise AssertionError when the law does not hold."""
        with self._changed:
            if not 0 <= self._stalled <= self._alive <= self._size + self._spares:
                raise AssertionError(f"{self._stalled} stalled of {self._alive}, limit {self._size + self._spares}")
            if self._idle < 0 or self._idle + self._stalled > self._alive:
                raise AssertionError(f"{self._idle} idle and {self._stalled} stalled of {self._alive}")
            if any(job.state is not _State.QUEUED for job in self._queue):
                raise AssertionError("a job in the queue is not queued")

    def _start_where_needed(self) -> None:
        wanted = len(self._queue) - self._idle
        room = min(self._size - (self._alive - self._stalled), self._size + self._spares - self._alive)
        for _ in range(min(wanted, room)):
            self._alive += 1
            self._idle += 1
            threading.Thread(target=self._run, name=f"{self._name}-{self._alive}", daemon=True).start()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.result = job.work()
            except BaseException as error:
                # Whatever it is, it belongs to whoever waits for this job; the thread goes on.
                job.result = error
            with self._changed:
                # Idle before anyone hears of the end: whoever submits then needs no further thread.
                self._idle += 1
                job.state = _State.ENDED
                if job.is_stalled:
                    self._stalled -= 1
            job.announce()
            del job

    def _next(self) -> Job[Any] | None:
        """Wait for a job; None when this thread is to end: all are, or it hung and its place was taken."""
        with self._changed:
            while not self._queue and not self._closed and self._alive - self._stalled <= self._size:
                self._changed.wait()
            self._idle -= 1
            if self._closed or self._alive - self._stalled > self._size:
                self._alive -= 1
                return None
            job = self._queue.popleft()
            job.state = _State.RUNNING
            return job
