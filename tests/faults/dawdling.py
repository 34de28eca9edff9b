"""L3 in memory that takes a random, short time over everything."""

import asyncio
import random
from collections.abc import Sequence

from forestage.core.layout import ModelLayout
from forestage.storage.base import PageRead, Presence, Probe, ReadOutcome, Report
from forestage.storage.memory import MemoryStorage

__all__ = ["Dawdling"]


class Dawdling(MemoryStorage):
    """Each probe and page takes up to `longest_s` seconds; `loose` of the pages fail in one way or another."""

    def __init__(self, seed: int, longest_s: float = 0.002, loose: float = 0.0) -> None:
        super().__init__()
        self.randomness = random.Random(seed)
        self.longest_s = longest_s
        self.loose = loose

    async def _dawdle(self) -> None:
        if self.randomness.random() < 0.7:
            await asyncio.sleep(self.randomness.uniform(0, self.longest_s))

    async def probe(self, model: ModelLayout, probe: Probe) -> Presence:
        await self._dawdle()
        return await super().probe(model, probe)

    async def read_into(self, model: ModelLayout, reads: Sequence[PageRead], report: Report) -> None:
        await self._dawdle()
        if self.randomness.random() >= self.loose:
            await super().read_into(model, reads, report)
            return
        failures = (ReadOutcome.MISSING, ReadOutcome.CORRUPT, ReadOutcome.ERROR)
        for index in range(len(reads)):
            report(index, self.randomness.choice(failures))
