"""Fills: pages of a job copied from their slots into another process's memory, while they come.

A page is copied once the job holds it, whole and verified; what was copied counts only as far as the job's lease holds
it to the end, so that a slot that was given up meanwhile is no page. Copies are made on threads of their own.

Law: `run` returns, or raises, only when no thread writes for its fill any more, whatever ended it: nothing is written
to a region after the answer. A thread stops between two pages.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from forestage.core.errors import GoneError
from forestage.core.fill_target import FillTarget
from forestage.core.job import Job
from forestage.pool.foreign import ForeignMemory
from forestage.prefetch.reads import SlotMemory

__all__ = ["Fill", "Fills"]

# One keeps up with what a core can copy; the second is for a fill of another rank beside it.
_THREADS = 2


@dataclass(slots=True, eq=False)
class Fill:
    """One job's pages on their way into a region. `copied[i]` is one behind the last page copied for target i."""

    job: Job
    memory: ForeignMemory
    targets: Sequence[FillTarget]
    stopped: bool = False
    copied: list[int] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.copied = [max(target.first, self.job.request.device_pages) for target in self.targets]

    def stop(self) -> None:
        """Begin no page any more: nobody waits for them. Idempotent."""
        self.stopped = True
        self.news.set()

    def filled(self) -> list[range]:
        """Return the pages of each target that are whole in the region. Only once the fill has run, with the lease."""
        return [
            range(there.start, max(there.start, min(there.stop, copied)))
            for (there, _), copied in zip(map(self._there, self.targets), self.copied, strict=True)
        ]

    def next_pages(self) -> list[tuple[int, int, int]]:
        """Return target, page and slot of what the job has and what is not copied yet."""
        pages = []
        for at, target in enumerate(self.targets):
            if self.job.done:
                there, slots = self._there(target)
                first = max(self.copied[at], there.start)
                pages += [(at, page, slots[page - there.start]) for page in range(first, there.stop)]
            elif not self.job.layout.components[target.component].is_tail:
                # Of states it only turns out in the end which are needed.
                held = self.job.holds[target.component]
                for page in range(self.copied[at], min(target.last, self.job.contiguous)):
                    if page not in held:
                        break
                    pages.append((at, page, held[page]))
        return pages

    def _there(self, target: FillTarget) -> tuple[range, Sequence[int]]:
        """Return which pages of a target the finished job has leased, and their slots."""
        lease = self.job.lease
        if lease is None or not lease.alive:
            return range(target.first, target.first), ()
        slots = lease.slots[target.component]
        begin = lease.length - len(slots)
        first, last = max(target.first, begin), min(target.last, lease.length)
        return range(first, max(first, last)), slots[first - begin : max(first, last) - begin]


class Fills:
    """Runs fills on one event loop. `on_end` is called there whenever one has ended."""

    def __init__(self, memory: SlotMemory, region_of: Callable[[str, int], int], on_end: Callable[[], None]) -> None:
        self._memory = memory
        self._region_of = region_of
        self._on_end = on_end
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="forestage-fill")
        self._running: set[Fill] = set()
        self._copying = 0
        self._calm = asyncio.Event()
        self._calm.set()
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Fills that have not ended."""
        return len(self._running)

    @property
    def copying(self) -> int:
        """Fills for which a thread writes now, or is about to."""
        return self._copying

    async def wait_for_copies(self) -> None:
        """Return when no thread writes. Leaving early changes nothing."""
        await self._calm.wait()

    def wake(self) -> None:
        """Have fills look for pages: the engine has taken a step, or a region has ended."""
        for fill in self._running:
            fill.news.set()

    def close(self) -> None:
        """Stop what runs, and begin nothing any more. Idempotent."""
        self._closed = True
        for fill in self._running:
            fill.stop()
        self._threads.shutdown(wait=False)

    async def run(self, fill: Fill) -> None:
        """Copy pages until the job is done and all that it has is copied, or the fill is stopped.

        Raises GoneError when the region ends meanwhile or cannot be written to. The job is the caller's to forget.
        """
        fill.memory.use()
        self._running.add(fill)
        try:
            while not (fill.stopped or self._closed or fill.memory.closed):
                fill.news.clear()
                done = fill.job.done
                pages = fill.next_pages()
                if pages:
                    await self._copy(fill, pages)
                elif done:
                    return
                else:
                    await fill.news.wait()
            if fill.memory.closed:
                raise GoneError("the connection of this region has ended", slug="region-gone")
        finally:
            self._running.discard(fill)
            fill.memory.done_with()
            self._on_end()

    async def _copy(self, fill: Fill, pages: list[tuple[int, int, int]]) -> None:
        model = fill.job.layout.name
        work = []
        for at, page, slot in pages:
            target = fill.targets[at]
            views = self._memory.shard_views(self._region_of(model, target.component), slot)
            work.append((at, page, views[target.shard]))
        self._copying += 1
        self._calm.clear()
        copying = asyncio.get_running_loop().run_in_executor(self._threads, _write, fill, work)
        was_cancelled = False
        while not copying.done():
            try:
                await asyncio.wait((copying,))
            except asyncio.CancelledError:
                was_cancelled = True
                fill.stop()
        self._copying -= 1
        if not self._copying:
            self._calm.set()
        failure = copying.exception()
        if was_cancelled:
            raise asyncio.CancelledError
        if isinstance(failure, OSError):
            raise GoneError(f"the region cannot be written to: {failure}", slug="region-gone") from failure
        copying.result()


def _write(fill: Fill, work: Sequence[tuple[int, int, memoryview]]) -> None:
    """Write pages until the fill is stopped; on a thread."""
    for at, page, data in work:
        if fill.stopped or fill.memory.closed:
            return
        target = fill.targets[at]
        fill.memory.write(target.offsets_of(page), target.run_bytes, data)
        fill.copied[at] = page + 1
