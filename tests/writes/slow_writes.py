"""An L3 whose writes wait for the test, and engines that fill what they were lent."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from forestage.core.layout import ModelLayout
from forestage.core.write import Write
from forestage.storage.base import Buffer
from forestage.storage.memory import MemoryStorage
from support.live import Live, content, until

__all__ = ["SlowWrites", "fill", "fill_answer", "kv_of", "written"]


class SlowWrites(MemoryStorage):
    """`hold` makes writes wait until `release`; `stubborn` ones do not end when they are cancelled either.

    Each takes `seconds`; `times` are begin and end of those that ended well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[tuple[int, bytes]] = []
        self.at_once = 0
        self.most_at_once = 0
        self.error: Exception | None = None
        self.stubborn = False
        self.seconds = 0.0
        self.times: list[tuple[float, float]] = []
        self.only: bytes | None = None
        self._gate = asyncio.Event()
        self._gate.set()

    def hold(self, *, stubborn: bool = False, only: bytes | None = None) -> None:
        """Let no write end, or none of the page `only`."""
        self.stubborn, self.only = stubborn, only
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    async def write(self, model: ModelLayout, component_index: int, key: bytes, shards: Sequence[Buffer]) -> None:
        self.begun.append((component_index, key))
        begin = time.monotonic()
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self.seconds)
            if self.only in (None, key):
                await self._wait()
            if self.error is not None:
                # A fresh one: an error that stays keeps the frames it went through, and with them the slot.
                raise type(self.error)(*self.error.args)
            await super().write(model, component_index, key, shards)
            self.times.append((begin, time.monotonic()))
        finally:
            self.at_once -= 1

    async def _wait(self) -> None:
        cancelled = None
        while not self._gate.is_set():
            try:
                await self._gate.wait()
            except asyncio.CancelledError as error:
                cancelled = error
                if not self.stubborn:
                    raise
        if cancelled is not None:
            raise cancelled


def fill(service: Live, write: Write) -> None:
    """Put into the slots of an open write what belongs there, as an engine would."""
    for c, slots in enumerate(write.slots):
        for page, slot in slots.items():
            _put(service, c, slot, write.keys[page])


def fill_answer(service: Live, keys: Sequence[bytes], answer: Any, tails: Sequence[int] = ()) -> None:
    """Put into the slots of an answer what belongs there; `tails` as asked, for the second component."""
    for number, slots in enumerate(answer["slots"].values()):
        for page, slot in zip(tails if number else range(len(keys)), slots, strict=True):
            if slot is not None:
                _put(service, number, slot, keys[page])


def _put(service: Live, region: int, slot: int, key: bytes) -> None:
    pool = service.parts.pool
    (view,) = pool.shard_views(region, slot)
    view[:] = content(key, pool.geometry.regions[region].component.name)


def kv_of(service: Live, storage: MemoryStorage, keys: Sequence[bytes]) -> list[bytes]:
    """Return those of some keys whose first component L3 has, byte for byte."""
    layout = service.engine.pools["m"].layout
    return [key for key in keys if storage.peek(layout, 0, key) == (content(key, "kv"),)]


async def written(service: Live, keys: Sequence[bytes]) -> Write:
    """Reserve, fill and commit."""
    write = await service.parts.service.begin_write("m", keys, {})
    assert write.granted == len(keys)
    fill(service, write)
    return service.parts.service.commit_write(write.id)


async def settled(write: Write) -> None:
    await until(lambda: write.settled)
