"""A storage with injected latency and faults, for tests of what stands before it.

Law: a read that has begun keeps its buffers until it ends, whoever is cancelled meanwhile, and may write to them to
the last moment; `open_reads` is the number of those. So does a write that hangs; `open_writes` counts the writes.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from forestage.core.errors import StorageUnavailableError
from forestage.core.layout import ModelLayout
from forestage.storage.base import Buffer, PageRead, Presence, Probe, ReadOutcome, Report, Storage

__all__ = ["FaultyStorage"]


@dataclass(frozen=True, slots=True)
class _Fault:
    delay_s: float = 0.0
    hold: bool = False
    outcome: ReadOutcome | None = None
    withheld_bytes: int = 0
    released: asyncio.Event = field(default_factory=asyncio.Event)


class FaultyStorage(Storage):
    """Hands everything on to `inner`, page by page, and does what it was told to some of it."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.kind = inner.kind
        self.batch_bytes = inner.batch_bytes
        self.batches_in_flight = inner.batches_in_flight
        self.open_reads = 0
        self.open_writes = 0
        self.reads: Counter[tuple[int, bytes]] = Counter()
        self.log: list[tuple[int, bytes]] = []
        self.probes = 0
        self.stalls = 0
        self.probe_delay_s = 0.0
        self.refuse_probes = False
        self.write_error: Exception | None = None
        self._faults: dict[tuple[int | None, bytes | None], _Fault] = {}
        self._hung_probes: asyncio.Event | None = None
        self._hung_writes: asyncio.Event | None = None

    def fault(
        self,
        component_index: int | None = None,
        key: bytes | None = None,
        *,
        delay_s: float = 0.0,
        hold: bool = False,
        outcome: ReadOutcome | None = None,
        withheld_bytes: int = 0,
    ) -> None:
        """Treat reads like this from now on; the most exact fault counts, and without arguments all are well again.

        Args:
            component_index: of the pages meant; None for all components.
            key: of the page meant; None for all.
            delay_s: how long each takes at least.
            hold: begin, and end only after `release`.
            outcome: end like this instead of reading.
            withheld_bytes: so many of the last bytes of a page arrive only after `release`.
        """
        if component_index is None and key is None:
            self._faults.clear()
        self._faults[component_index, key] = _Fault(delay_s, hold or withheld_bytes > 0, outcome, withheld_bytes)

    def hang_probes(self) -> None:
        """Answer no probe until `release`."""
        self._hung_probes = asyncio.Event()

    def hang_writes(self) -> None:
        """Let no write end until `release`, as if its thread hung in the kernel: not when it is cancelled either."""
        self._hung_writes = asyncio.Event()

    def release(self) -> None:
        """Let everything go on that is held; what was to be held from now on is not."""
        for fault in self._faults.values():
            fault.released.set()
        for hung in (self._hung_probes, self._hung_writes):
            if hung is not None:
                hung.set()

    async def open(self) -> None:
        await self.inner.open()

    async def probe(self, model: ModelLayout, probe: Probe) -> Presence:
        self.probes += 1
        if self.refuse_probes:
            raise StorageUnavailableError("told to refuse probes")
        if self._hung_probes is not None:
            await self._hung_probes.wait()
        if self.probe_delay_s:
            await asyncio.sleep(self.probe_delay_s)
        return await self.inner.probe(model, probe)

    async def read_into(self, model: ModelLayout, reads: Sequence[PageRead], report: Report) -> None:
        def stop() -> None:
            for read in reads:
                read.stopped = True

        await _outlast(self._read_all(model, reads, report), stop)

    def stalled(self, reads: Sequence[PageRead]) -> None:
        self.stalls += 1

    async def write(self, model: ModelLayout, component_index: int, key: bytes, shards: Sequence[Buffer]) -> None:
        self.open_writes += 1
        try:
            if self._hung_writes is not None:
                await _outlast(self._hung_writes.wait(), lambda: None)
            if self.write_error is not None:
                raise self.write_error
            await self.inner.write(model, component_index, key, shards)
        finally:
            self.open_writes -= 1

    async def delete(self, model: ModelLayout, component_index: int, key: bytes) -> bool:
        return await self.inner.delete(model, component_index, key)

    async def aclose(self) -> None:
        await self.inner.aclose()

    async def _read_all(self, model: ModelLayout, reads: Sequence[PageRead], report: Report) -> None:
        for index, read in enumerate(reads):
            if read.stopped:
                report(index, ReadOutcome.STOPPED)
                continue
            name = read.component_index, read.key
            self.reads[name] += 1
            self.log.append(name)
            self.open_reads += 1
            read.progress += 1
            try:
                outcome = await self._read(model, read, self._fault_of(*name))
            finally:
                self.open_reads -= 1
            report(index, outcome)

    async def _read(self, model: ModelLayout, read: PageRead, fault: _Fault) -> ReadOutcome:
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.withheld_bytes:
            return await self._read_withholding(model, read, fault)
        if fault.hold:
            await fault.released.wait()
        if fault.outcome is not None:
            return fault.outcome
        return await self._read_inner(model, read, read.views)

    async def _read_withholding(self, model: ModelLayout, read: PageRead, fault: _Fault) -> ReadOutcome:
        whole = [bytearray(len(view)) for view in read.views]
        outcome = await self._read_inner(model, read, tuple(map(memoryview, whole)))
        left = max(0, sum(map(len, whole)) - fault.withheld_bytes)
        for view, content in zip(read.views, whole, strict=True):
            arrived = min(left, len(view))
            view[:arrived] = content[:arrived]
            left -= arrived
        await fault.released.wait()
        for view, content in zip(read.views, whole, strict=True):
            view[:] = content
        return fault.outcome or outcome

    async def _read_inner(self, model: ModelLayout, read: PageRead, views: tuple[memoryview, ...]) -> ReadOutcome:
        # A read of its own, which nobody stops: this one has begun, and what hangs heeds no flag.
        begun = PageRead(read.component_index, read.key, views)
        outcomes: list[ReadOutcome] = []
        await self.inner.read_into(model, [begun], lambda _, outcome: outcomes.append(outcome))
        self.batch_bytes = self.inner.batch_bytes
        read.progress += begun.progress
        return outcomes[0]

    def _fault_of(self, component_index: int, key: bytes) -> _Fault:
        for name in ((component_index, key), (None, key), (component_index, None), (None, None)):
            if name in self._faults:
                return self._faults[name]
        return _Fault()


async def _outlast(work: Coroutine[Any, Any, object], on_cancel: Callable[[], None]) -> None:
    """Do all of `work`, whoever is cancelled meanwhile; that shows only afterwards."""
    doing = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not doing.done():
        try:
            await asyncio.wait([doing])
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
            on_cancel()
    if cancelled is not None:
        raise cancelled
    doing.result()
