"""Reading many pages of an L3 into scratch memory, as fast as the storage likes to be read."""

import asyncio
import mmap
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from forestage.core.errors import StorageUnavailableError
from forestage.core.layout import ModelLayout
from forestage.storage.base import PageRead, ReadOutcome, Storage

__all__ = ["PageName", "ReadPage", "read_pages"]

PageName = tuple[int, bytes]  # component index, page key


@dataclass(frozen=True, slots=True)
class ReadPage:
    """How the read of one page ended; `views[s]` is the payload of shard s, meaningful only if it was loaded."""

    component_index: int
    key: bytes
    outcome: ReadOutcome
    views: tuple[memoryview, ...]

    @property
    def payload_bytes(self) -> int:
        return sum(map(len, self.views))


async def read_pages(
    storage: Storage,
    model: ModelLayout,
    pages: Sequence[PageName],
    handle: Callable[[list[ReadPage]], Awaitable[None]],
) -> None:
    """Read pages in batches, several at once, and await `handle` for each batch; the views are good until it returns.

    Raises StorageUnavailableError when the storage does not answer, and what `handle` raises.
    """
    waiting = deque(_batches(model, pages, storage.batch_bytes))
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(len(waiting), storage.batches_in_flight)):
                tasks.create_task(_work(storage, model, waiting, handle))
    except ExceptionGroup as group:
        raise _first_of(group) from group


def _first_of(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


async def _work(
    storage: Storage,
    model: ModelLayout,
    waiting: deque[list[PageName]],
    handle: Callable[[list[ReadPage]], Awaitable[None]],
) -> None:
    largest = max(component.slot_bytes for component in model.components)
    # Whole memory pages, as slots are.
    scratch = memoryview(mmap.mmap(-1, max(storage.batch_bytes, largest)))
    while waiting:
        reads: list[PageRead] = []
        at = 0
        for component_index, key in waiting.popleft():
            component = model.components[component_index]
            starts = [at + shard * component.shard_bytes for shard in range(component.shards)]
            reads.append(PageRead(component_index, key, tuple(scratch[s : s + component.bytes] for s in starts)))
            at += component.slot_bytes
        outcomes: list[ReadOutcome] = [ReadOutcome.ERROR] * len(reads)
        await storage.read_into(model, reads, outcomes.__setitem__)
        if ReadOutcome.UNREACHABLE in outcomes:
            raise StorageUnavailableError(f"{storage.kind} storage does not answer")
        done = zip(reads, outcomes, strict=True)
        await handle([ReadPage(read.component_index, read.key, outcome, read.views) for read, outcome in done])


def _batches(model: ModelLayout, pages: Sequence[PageName], batch_bytes: int) -> list[list[PageName]]:
    batches: list[list[PageName]] = []
    room = 0
    for page in pages:
        size = model.components[page[0]].slot_bytes
        if size > room:
            batches.append([])
            room = max(batch_bytes, size)
        batches[-1].append(page)
        room -= size
    return batches
