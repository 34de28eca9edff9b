"""A storage whose pages are files below one directory: the asynchronous side of the shelves.

Law: every batch of reads that runs is in `_running` until no thread touches its views any more.
"""

import contextlib
import logging
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from forestage.core.errors import StorageUnavailableError
from forestage.core.layout import ModelLayout
from forestage.storage.base import Buffer, PageRead, Presence, Probe, ReadOutcome, Report, Storage
from forestage.storage.beneath import FOLDER_FLAGS, open_beneath
from forestage.storage.leftovers import sweep
from forestage.storage.pace import Pace
from forestage.storage.presence import walk
from forestage.storage.shelf import Shelf, whole_pages
from forestage.storage.threads import Job, Threads

__all__ = ["DirectoryStorage"]

_log = logging.getLogger(__name__)
T = TypeVar("T")


class DirectoryStorage(Storage):
    """Reads, probes and writes in three sets of threads, so that a hung one holds up none of the other kinds.

    `root` is absolute and need not exist. Subclasses say where the pages of a model lie.
    """

    def __init__(self, root: str | os.PathLike[str], *, readers: int = 0) -> None:
        """Touch nothing yet.

        Args:
            root: the directory.
            readers: threads that read; 0 chooses for this machine.
        """
        self.root = os.path.abspath(root)
        readers = readers or default_readers()
        self.batches_in_flight = 2 * readers  # one that is read and one that waits, for every thread
        self._pace = Pace()
        self.batch_bytes = self._pace.batch_bytes
        self._readers = Threads("forestage-read", readers, spares=readers)
        self._probers = Threads("forestage-probe", 2)
        self._writers = Threads("forestage-write", 2)
        self._sweepers = Threads("forestage-sweep", 1, spares=0)
        self._closing = threading.Event()
        self._shelves: dict[ModelLayout, tuple[Shelf, ...]] = {}
        self._running: dict[PageRead, Job[tuple[int, float]]] = {}

    @abstractmethod
    def _shelf(self, model: ModelLayout, component_index: int) -> Shelf:
        """Lay out one component. Raises ValueError when its pages cannot be named."""

    @abstractmethod
    def _folders(self) -> Iterator[str]:
        """Yield the directories in which pages of any model may lie; none that cannot be read. Blocking."""

    def iter_pages(self, model: ModelLayout) -> Iterator[tuple[int, bytes]]:
        """Yield (component index, key) of every page that is there in whole, going by names. Blocking.

        Raises StorageUnavailableError when the root is not there, OSError when it cannot be read.
        """
        self.require_root()
        yield from whole_pages(self.shelves(model))

    async def open(self) -> None:
        """Begin to remove what killed writers left, in a thread of its own that `aclose` stops."""
        self._sweepers.submit(self._sweep)

    async def probe(self, model: ModelLayout, probe: Probe) -> Presence:
        given_up = threading.Event()
        job = self._probers.submit(partial(self._look, model, probe, given_up))
        try:
            return await job.wait()
        finally:
            # Cancelled: a thread that only is busy ends at the next page, one that hangs is replaced.
            given_up.set()
            if not self._probers.withdraw(job):
                self._probers.replace_stalled(job)

    async def read_into(self, model: ModelLayout, reads: Sequence[PageRead], report: Report) -> None:
        if not reads:
            return
        try:
            job = self._readers.submit(partial(_read_batch, self.shelves(model), reads, report))
        except StorageUnavailableError:
            _report_all(reads, report, ReadOutcome.UNREACHABLE)
            return

        def end_soon() -> None:
            for read in reads:
                read.stopped = True
            self._readers.withdraw(job)

        self._running[reads[0]] = job
        try:
            with contextlib.suppress(StorageUnavailableError):
                self._pace.learn(*await job.outlast(end_soon))
                self.batch_bytes = self._pace.batch_bytes
        finally:
            del self._running[reads[0]]
            if job.is_withdrawn:
                _report_all(reads, report, ReadOutcome.STOPPED)

    def stalled(self, reads: Sequence[PageRead]) -> None:
        for read in reads:
            job = self._running.get(read)
            if job is not None and not self._readers.withdraw(job):
                self._readers.replace_stalled(job)

    async def write(self, model: ModelLayout, component_index: int, key: bytes, shards: Sequence[Buffer]) -> None:
        component = model.components[component_index]
        if [len(shard) for shard in shards] != [component.bytes] * component.shards:
            raise ValueError(f"{component.name}: want {component.shards} shards of {component.bytes} bytes")
        await self._in_writer(partial(self.shelves(model)[component_index].write, key, shards))

    async def delete(self, model: ModelLayout, component_index: int, key: bytes) -> bool:
        remove = self.shelves(model)[component_index].remove
        return await self._in_writer(lambda given_up: remove(key))

    async def aclose(self) -> None:
        self._closing.set()
        for threads in (self._readers, self._probers, self._writers, self._sweepers):
            threads.close()

    def shelves(self, model: ModelLayout) -> tuple[Shelf, ...]:
        """Return the shelf of each component."""
        shelves = self._shelves.get(model)
        if shelves is None:
            shelves = tuple(self._shelf(model, index) for index in range(len(model.components)))
            self._shelves[model] = shelves
        return shelves

    def check_integrity(self) -> None:
        """Raise AssertionError when a law of the threads does not hold."""
        for threads in (self._readers, self._probers, self._writers, self._sweepers):
            threads.check_integrity()

    def require_root(self) -> None:
        """Raise StorageUnavailableError unless the root is a directory that answers. Blocking."""
        try:
            os.stat(self.root + "/.")
        except OSError as error:
            raise StorageUnavailableError(f"{self.kind} root {self.root}: {error.strerror}") from error

    def _look(self, model: ModelLayout, probe: Probe, given_up: threading.Event) -> Presence:
        self.require_root()
        shelves = self.shelves(model)

        def holds(component_index: int, key: bytes) -> bool:
            if given_up.is_set():
                raise StorageUnavailableError("the probe was given up")
            return shelves[component_index].holds(key)

        return walk(model, probe, holds)

    async def _in_writer(self, work: Callable[[threading.Event], T]) -> T:
        """Run `work` in a writing thread; the event that it gets is set when its caller was cancelled."""
        given_up = threading.Event()
        job = self._writers.submit(partial(work, given_up))

        def end_soon() -> None:
            # A thread that only is busy ends at the next chunk, one that hangs must not hold up other writes.
            given_up.set()
            if not self._writers.withdraw(job):
                self._writers.replace_stalled(job)

        return await job.outlast(end_soon)

    def _sweep(self) -> None:
        removed = sweep(
            self._folders(),
            time.time(),
            self._closing,
            lambda folder: open_beneath(self.root, folder, FOLDER_FLAGS),
        )
        if removed:
            _log.info("%s: removed %d files that killed writers had left", self.kind, removed)


def default_readers() -> int:
    """Return how many threads read when nothing is configured: one a core, at least 2 and at most 8.

    More than cores gain nothing from a page cache; more than 8 mostly wait for each other's interpreter lock.
    """
    return max(2, min(8, len(os.sched_getaffinity(0))))


def _read_batch(shelves: tuple[Shelf, ...], reads: Sequence[PageRead], report: Report) -> tuple[int, float]:
    """Read in order; return how many bytes were loaded in how many seconds."""
    begin = time.perf_counter()
    loaded_bytes = 0
    spare = shelves[0].new_spare()
    for index, read in enumerate(reads):
        if read.stopped:
            report(index, ReadOutcome.STOPPED)
            continue
        read.progress += 1
        shelf = shelves[read.component_index]
        try:
            outcome = shelf.read(read, spare)
        except Exception:
            _log.exception("reading a page failed in an unexpected way")
            outcome = ReadOutcome.ERROR
        if outcome is ReadOutcome.LOADED:
            loaded_bytes += shelf.page_bytes
        report(index, outcome)
    return loaded_bytes, time.perf_counter() - begin


def _report_all(reads: Sequence[PageRead], report: Report, outcome: ReadOutcome) -> None:
    for index in range(len(reads)):
        report(index, outcome)
