"""One server: its idle connections, and the threads that work on connections to it.

Law: a link is idle here or held by one errand, never both; what is given back after `flush` is closed if it was opened
before.
"""

import threading
from collections.abc import Callable

from forestage.core.errors import StorageUnavailableError
from forestage.storage.redis.allowance import Allowance
from forestage.storage.redis.link import Link
from forestage.storage.threads import Threads

__all__ = ["Node"]

# Connections beside the readers': a probe or a write never waits for a bulk read.
_PROBERS = 2
_WRITERS = 2
_LARGE_REPLIES_BYTES = 16 << 20


class Node:
    """A server, wherever that is when the next connection is made."""

    def __init__(self, name: str, connect: Callable[[], Link], num_readers: int) -> None:
        """Connect to nothing and start no thread yet.

        Args:
            name: for messages and for the names of threads.
            connect: makes a connection; called in a thread, raises StorageUnavailableError.
            num_readers: how many connections read at once.
        """
        self.name = name
        self._connect = connect
        self.readers = Threads(f"redis-read-{name}", num_readers, spares=num_readers)
        self.probers = Threads(f"redis-probe-{name}", _PROBERS)
        self.writers = Threads(f"redis-write-{name}", _WRITERS)
        self.allowance = Allowance(_LARGE_REPLIES_BYTES)
        self._max_idle = num_readers + _PROBERS + _WRITERS
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._born: dict[Link, int] = {}  # every link that is open: how often `flush` had been called before
        self._num_flushes = 0
        self._closed = False

    @property
    def num_links(self) -> int:
        """How many connections are open."""
        return len(self._born)

    def take(self, *, fresh: bool = False) -> Link:
        """Take an idle connection or make one; with `fresh`, make one. Blocking. Raises StorageUnavailableError."""
        while not fresh and (link := self._pop_idle()) is not None:
            if link.is_usable():
                return link
            self.drop(link)
        num_flushes = self._num_flushes
        link = self._connect()
        with self._lock:
            if not self._closed:
                self._born[link] = num_flushes
                return link
        link.close()
        raise StorageUnavailableError("the storage is closed")

    def give(self, link: Link) -> None:
        """Give back a link on which no reply is due."""
        with self._lock:
            if not self._closed and self._born[link] == self._num_flushes and len(self._idle) < self._max_idle:
                link.on_pause = None
                self._idle.append(link)
                return
        self.drop(link)

    def drop(self, link: Link) -> None:
        """Close a link that was taken."""
        with self._lock:
            del self._born[link]
        link.close()

    def trusts(self, link: Link) -> bool:
        """Say whether no connection to this server failed since `link`, which was taken, was made."""
        return self._born[link] == self._num_flushes

    def flush(self) -> None:
        """Close what is idle, and whatever is in use as soon as it comes back: the server is gone or another one."""
        with self._lock:
            self._num_flushes += 1
            dropped, self._idle = self._idle, []
        for link in dropped:
            self.drop(link)

    def close(self) -> None:
        """Close what is idle, refuse further work, let threads end. Waits for none. Idempotent."""
        with self._lock:
            self._closed = True
        for threads in (self.readers, self.probers, self.writers):
            threads.close()
        self.flush()

    def check_integrity(self) -> None:
        """Raise AssertionError when a law does not hold."""
        for part in (self.readers, self.probers, self.writers, self.allowance):
            part.check_integrity()
        with self._lock:
            if len(set(self._idle)) != len(self._idle) or not set(self._idle) <= set(self._born):
                raise AssertionError("an idle connection is listed twice, or is not open")

    def _pop_idle(self) -> Link | None:
        with self._lock:
            return self._idle.pop() if self._idle else None
