"""Batches of page reads between the engine and a storage.

Law: a batch borrows slots from the engine and gives every one of them back exactly once, however its storage call ends:
returned, raised, cancelled (begun or not) or stalled. Reports come from reader threads; they are queued and taken in
on the loop, many at a time.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from forestage.core.engine import Engine
from forestage.core.job import Reason
from forestage.core.layout import ModelLayout
from forestage.core.loads import Load
from forestage.storage.base import PageRead, ReadOutcome, Storage

__all__ = ["Reads", "SlotMemory"]

log = logging.getLogger("forestage.prefetch")

# Pages are taken in so often while they come: one at a time, the reader threads and the loop would only wake each
# other. The end of a batch is taken in at once.
_TAKE_EVERY_S = 0.001

_FAILURES = {
    ReadOutcome.MISSING: Reason.VANISHED,
    ReadOutcome.CORRUPT: Reason.CORRUPT,
    ReadOutcome.ERROR: Reason.STORAGE_ERROR,
    ReadOutcome.UNREACHABLE: Reason.STORAGE_ERROR,
}


class SlotMemory(Protocol):
    """The bytes of the pool."""

    def shard_views(self, region_index: int, slot: int) -> tuple[memoryview, ...]:
        """Return one writable view a shard, each of exactly the component's bytes."""


class _Batch:
    """Loads lent to one storage call; `open` are those that have had no report, `stalled` were given up since."""

    def __init__(self, model: str, loads: Sequence[Load]) -> None:
        self.model = model
        self.loads = loads
        self.open = set(range(len(loads)))
        self.stalled: set[int] = set()


class Reads:
    """Keeps as many batches in flight as the storage likes. `on_progress` is called on the loop after each change."""

    def __init__(
        self,
        engine: Engine,
        memory: SlotMemory,
        region_of: Callable[[str, int], int],
        storage: Storage,
        clock: Callable[[], float],
        on_progress: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._memory = memory
        self._region_of = region_of
        self._storage = storage
        self._clock = clock
        self._on_progress = on_progress
        self._reports: deque[tuple[_Batch, int, ReadOutcome]] = deque()
        self._waking = False
        self._calls: set[_Batch] = set()
        self._delivering = 0

    @property
    def in_flight(self) -> int:
        """Calls of the storage that have not returned, those that were given up among them."""
        return len(self._calls)

    @property
    def delivering(self) -> bool:
        """Some call of the storage goes on that was not given up."""
        return self._delivering > 0

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Hand the engine's next pages to the storage while it takes more.

        A batch that was given up does not count: reads that hang for good must not keep all others waiting.
        """
        while self._delivering < self._storage.batches_in_flight:
            lent = self._engine.next_batch(self._storage.batch_bytes)
            if lent is None:
                return
            layout, loads = lent
            batch = _Batch(layout.name, loads)
            self._calls.add(batch)
            self._delivering += 1
            task = tasks.create_task(self._read(layout, batch))
            # A task that is cancelled before its first step never comes to its own clean-up.
            task.add_done_callback(partial(self._end, batch))

    def close(self) -> None:
        """Fail what was not handed to the storage and never will be. No read may be running."""
        while (lent := self._engine.next_batch(self._storage.batch_bytes)) is not None:
            layout, loads = lent
            for load in loads:
                self._engine.read_ended(layout.name, load, Reason.STORAGE_ERROR, self._clock())

    async def _read(self, layout: ModelLayout, batch: _Batch) -> None:
        loop = asyncio.get_running_loop()

        def report(index: int, outcome: ReadOutcome) -> None:
            self._reports.append((batch, index, outcome))
            if not self._waking:
                self._waking = True
                loop.call_soon_threadsafe(self._take_reports)

        try:
            await self._storage.read_into(layout, [self._page_read(layout, load) for load in batch.loads], report)
        except Exception:
            log.exception("a storage raised instead of reporting; its pages count as unreadable")
        finally:
            # Cancelled or not: the storage has let go of every slot of this batch.
            self._end(batch)

    def _end(self, batch: _Batch, *_: object) -> None:
        """Take back what is left of a batch. Idempotent."""
        if batch not in self._calls:
            return
        self._drain()
        self._calls.discard(batch)
        if batch.open:
            self._delivering -= 1
        left, batch.open, batch.stalled = batch.open | batch.stalled, set(), set()
        for index in left:
            self._engine.read_ended(batch.model, batch.loads[index], Reason.STORAGE_ERROR, self._clock())
        self._on_progress()

    def _page_read(self, layout: ModelLayout, load: Load) -> PageRead:
        views = self._memory.shard_views(self._region_of(layout.name, load.component), load.slot)
        read = PageRead(load.component, load.key, views, stopped=not load.subscribers)
        load.read = read
        return read

    def _take_reports(self) -> None:
        if not self._reports:
            self._waking = False
            if not self._reports:
                return  # a report that comes from now on wakes the loop
            self._waking = True
        self._drain()
        self._on_progress()
        asyncio.get_running_loop().call_later(_TAKE_EVERY_S, self._take_reports)

    def _drain(self) -> None:
        engine, now, reports = self._engine, self._clock(), self._reports
        loaded: list[Load] = []  # of one model
        model = ""
        while reports:
            batch, index, outcome = reports.popleft()
            batch.open.discard(index)
            if not batch.open:
                self._delivering -= 1
            load = batch.loads[index]
            if loaded and (outcome is not ReadOutcome.LOADED or batch.model != model):
                engine.pages_loaded(model, loaded, now)
                loaded = []
            if outcome is ReadOutcome.LOADED:
                model = batch.model
                loaded.append(load)
            elif outcome is ReadOutcome.STOPPED:
                engine.read_ended(batch.model, load, None, now, untouched=True)
            elif outcome is ReadOutcome.STALLED:
                batch.stalled.add(index)
                engine.read_stalled(batch.model, load, now)
            else:
                engine.read_ended(batch.model, load, _FAILURES[outcome], now)
        if loaded:
            engine.pages_loaded(model, loaded, now)
