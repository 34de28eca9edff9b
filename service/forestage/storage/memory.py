"""L3 in a dictionary: the seam's reference for tests, with ways around it to look, put and remove."""

import asyncio
from collections.abc import Iterator, Sequence

from forestage.core.errors import StorageUnavailableError
from forestage.core.layout import ModelLayout
from forestage.storage.base import Buffer, PageRead, Presence, Probe, ReadOutcome, Report, Storage
from forestage.storage.presence import walk

__all__ = ["MemoryStorage"]

_Name = tuple[str, str, bytes]  # fingerprint, component, page key


class MemoryStorage(Storage):
    """Keeps copies of what is written; nothing outlives the object."""

    kind = "memory"

    def __init__(self) -> None:
        self._pages: dict[_Name, list[bytes | None]] = {}
        self._closed = False

    def peek(self, model: ModelLayout, component_index: int, key: bytes) -> tuple[bytes | None, ...]:
        """Return what is stored of a page, None for each shard that is not."""
        absent: list[bytes | None] = [None] * model.components[component_index].shards
        return tuple(self._pages.get(_name(model, component_index, key), absent))

    def put(self, model: ModelLayout, component_index: int, key: bytes, shards: Sequence[Buffer | None]) -> None:
        """Store shards as they are, of whatever size; None leaves one out."""
        copies = [None if shard is None else bytes(shard) for shard in shards]
        self._pages[_name(model, component_index, key)] = copies

    def remove(self, model: ModelLayout, component_index: int, key: bytes, shard: int | None = None) -> bool:
        """Drop one shard of a page, or all of them; say whether there was anything."""
        name = _name(model, component_index, key)
        shards = self._pages.get(name, [])
        dropped = [value for index, value in enumerate(shards) if shard in {None, index} and value is not None]
        kept = [None if shard in {None, index} else value for index, value in enumerate(shards)]
        if any(value is not None for value in kept):
            self._pages[name] = kept
        else:
            self._pages.pop(name, None)
        return bool(dropped)

    def iter_pages(self, model: ModelLayout) -> Iterator[tuple[int, bytes]]:
        """Yield (component index, key) of every page that is there in whole."""
        for index, component in enumerate(model.components):
            for fingerprint, name, key in sorted(self._pages):
                if (fingerprint, name) == (model.fingerprint, component.name) and self._holds(model, index, key):
                    yield index, key

    async def probe(self, model: ModelLayout, probe: Probe) -> Presence:
        await asyncio.sleep(0)
        self._require_open()
        return walk(model, probe, lambda component_index, key: self._holds(model, component_index, key))

    async def read_into(self, model: ModelLayout, reads: Sequence[PageRead], report: Report) -> None:
        done = 0
        try:
            for index, read in enumerate(reads):
                outcome = self._read(model, read)
                done = index + 1
                report(index, outcome)
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            for index in range(done, len(reads)):
                report(index, ReadOutcome.STOPPED)
            raise

    async def write(self, model: ModelLayout, component_index: int, key: bytes, shards: Sequence[Buffer]) -> None:
        self._require_open()
        component = model.components[component_index]
        if [len(shard) for shard in shards] != [component.bytes] * component.shards:
            raise ValueError(f"{component.name}: want {component.shards} shards of {component.bytes} bytes")
        self.put(model, component_index, key, shards)

    async def delete(self, model: ModelLayout, component_index: int, key: bytes) -> bool:
        self._require_open()
        return self.remove(model, component_index, key)

    async def aclose(self) -> None:
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise StorageUnavailableError("the storage is closed")

    def _holds(self, model: ModelLayout, component_index: int, key: bytes) -> bool:
        return None not in self.peek(model, component_index, key)

    def _read(self, model: ModelLayout, read: PageRead) -> ReadOutcome:
        if self._closed:
            return ReadOutcome.UNREACHABLE
        if read.stopped:
            return ReadOutcome.STOPPED
        read.progress += 1
        for view, value in zip(read.views, self.peek(model, read.component_index, read.key), strict=True):
            if value is None:
                return ReadOutcome.MISSING
            if len(value) != len(view):
                return ReadOutcome.CORRUPT
            view[:] = value
        return ReadOutcome.LOADED


def _name(model: ModelLayout, component_index: int, key: bytes) -> _Name:
    return model.fingerprint, model.components[component_index].name, bytes(key)
