"""Work that a thread does over a connection and that the event loop can break off at any moment.

Law: a link is held by at most one errand, and an errand touches buffers only while it holds one; one that was broken
off gets no further link.
"""

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from forestage.core.errors import StorageUnavailableError
from forestage.storage.redis.errors import AbandonedError, LinkError, OversizeError, ReplyError
from forestage.storage.redis.link import Link
from forestage.storage.redis.node import Node
from forestage.storage.threads import Threads

__all__ = ["Errand", "Run", "outlast"]

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Errand(ABC, Generic[T]):
    """Base of what runs in the threads of a node, for a number of things of kind T."""

    def __init__(self, node: Node, things: Iterable[T]) -> None:
        self.node = node
        #: What is not done.
        self.todo = deque(things)
        #: What the server sent elsewhere, with its words; no longer in `todo`.
        self.redirected: list[tuple[T, ReplyError]] = []
        #: Why it did not come to its end, unless it was broken off.
        self.failure: StorageUnavailableError | None = None
        self.is_broken_off = False
        #: Broken off because nothing came from the server.
        self.is_blamed = False
        self._held: Link | None = None
        self._holding = threading.Lock()

    @abstractmethod
    def _use(self, link: Link) -> None:
        """Do what is in `todo`. Raises LinkError."""

    def run(self) -> None:
        """Do the work, in a thread. Never raises.

        A connection that its server had left while it was idle is replaced once, unnoticed by the caller.
        """
        fresh = False
        while True:
            try:
                link = self.node.take(fresh=fresh)
            except StorageUnavailableError as error:
                self.failure = error
                return
            was_used, link.has_answered = link.has_answered, False
            if not self._hold(link):
                self.node.give(link)
                return
            try:
                self._use(link)
            except LinkError as error:
                self._let_go()
                self.node.drop(link)
                # 1. our own choice, made at most once a page; 2. left while idle; 3. a failure
                if not isinstance(error, AbandonedError | OversizeError):
                    if fresh or not was_used or link.has_answered:
                        self.failure = error
                        return
                    fresh = True
            except Exception as error:
                _log.exception("talking to %s failed in an unexpected way", self.node.name)
                self.failure = LinkError(f"unexpected: {error!r}")
                self._let_go()
                self.node.drop(link)
                return
            else:
                self._let_go()
                self.node.give(link)
                return

    def break_off(self) -> bool:
        """Wake the thread and let it end; True when it holds no link, and so will touch nothing any more."""
        with self._holding:
            self.is_broken_off = True
            if self._held is None:
                return True
            self._held.shut_down()
            return False

    def _hold(self, link: Link) -> bool:
        with self._holding:
            if not self.is_broken_off:
                self._held = link
            return not self.is_broken_off

    def _let_go(self) -> None:
        with self._holding:
            self._held = None


class Run:
    """An errand in threads, seen from the event loop."""

    def __init__(self, threads: Threads, errand: Errand[Any]) -> None:
        """Hand the errand to the next free thread. Raises StorageUnavailableError when the threads are closed."""
        self.errand = errand
        #: True as soon as the errand touches nothing any more; it does not say how it ended.
        self.is_released = False
        self._threads = threads
        self._waiter: asyncio.Future[None] | None = None
        self._job = threads.submit(errand.run)
        self._job.ended.add_done_callback(self._release)

    async def wait(self) -> None:
        """Wait for the release; for one task at a time, which may be cancelled without consequences."""
        if not self.is_released:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def break_off(self, *, blame: bool = False) -> None:
        """Let the errand end as soon as possible: at once if it has no connection yet. Idempotent.

        `blame` the server if it is because nothing came.
        """
        if self.is_released:
            return
        self.errand.is_blamed = self.errand.is_blamed or blame
        if self._threads.withdraw(self._job):
            self.errand.break_off()
        elif self.errand.break_off():
            self._threads.replace_stalled(self._job)
            self._release()

    def _release(self, _: object = None) -> None:
        self.is_released = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def outlast(runs: Sequence[Run], timeout_s: float | None = None) -> None:
    """Wait until all are released; those that are not after `timeout_s` seconds are broken off.

    A cancelled caller breaks all of them off, and is cancelled after the wait.
    """

    def give_up() -> None:
        for run in runs:
            run.break_off(blame=True)

    timer = asyncio.get_running_loop().call_later(timeout_s, give_up) if timeout_s is not None else None
    cancelled: asyncio.CancelledError | None = None
    for run in runs:
        while not run.is_released:
            try:
                await run.wait()
            except asyncio.CancelledError as error:
                cancelled = cancelled or error
                for other in runs:
                    other.break_off()
    if timer is not None:
        timer.cancel()
    if cancelled is not None:
        raise cancelled
