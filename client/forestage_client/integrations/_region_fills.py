"""SGLang's host pools as memory that the service fills itself: those of SGLang's shared-memory allocator.

Law: what cannot be filled so is answered None, with nothing being written any more, and is for the caller to copy.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from forestage_client import Client, Component
from forestage_client._errors import ForestageError, Gone
from forestage_client._memory import address_of
from forestage_client._memory_region import MemoryRegion, RegionTarget
from forestage_client.integrations._host_pages import HostPage, RunsPage
from forestage_client.integrations._outages import Away, Outages
from forestage_client.integrations._quiet_log import QuietLog
from forestage_client.integrations._sglang_settings import Settings

__all__ = ["RegionFills"]

_log = QuietLog(logging.getLogger(__name__))

#: After memory was not taken, or a fill was refused, it is not tried again for so long.
_PAUSE_S = 10.0
_PAUSE_GONE_S = 0.5


@dataclass(frozen=True, slots=True)
class _Place:
    """An allocator's files in a region: where each is mapped here, its size, and where it begins in the region."""

    allocator: Any
    region: MemoryRegion
    files: tuple[tuple[int, int, int], ...]

    def target(self, shard: int, component: Component, pages: Sequence[HostPage]) -> RegionTarget | None:
        """Return where pages lie in the region; None when one is not there, or not cut as the others are."""
        cut: tuple[int, ...] | None = None
        offsets: list[int] = []
        for page in pages:
            if not isinstance(page, RunsPage) or page.num_bytes != component.bytes:
                return None
            sizes = tuple(size for _, size in page.runs)
            if cut is None:
                cut = sizes
            elif cut != sizes:
                return None
            for address, size in page.runs:
                at = self._offset(address, size)
                if at is None:
                    return None
                offsets.append(at)
        return None if cut is None else RegionTarget(cut, offsets, shard)

    def _offset(self, address: int, size: int) -> int | None:
        for begin, length, start in self.files:
            if begin <= address and address + size <= begin + length:
                return start + address - begin
        return None


class RegionFills:
    """Registers the memory of allocators, and has pages filled into it, one fill at a time. For several threads."""

    def __init__(self, settings: Settings, client: Client, outages: Outages) -> None:
        self._settings = settings
        self._client = client
        self._outages = outages
        # Held while a fill runs, so that none loses its connection to the end of another.
        self._lock = threading.Lock()
        self._places: dict[int, _Place] = {}
        self._paused_until_s = 0.0

    def fill(
        self,
        pool: Any,
        keys: Sequence[str],
        component: Component,
        shard: int,
        pages: Sequence[HostPage],
        deadline_ms: int,
    ) -> tuple[int, list[bool]] | None:
        """Have pages of one component brought and put into SGLang's own slots.

        Returns how much of the prefix is there, and which pages are filled; None if the pages are not in memory that
        can be filled, or anything went wrong.
        """
        allocator = _allocator_of(pool)
        if allocator is None or not pages or not self._settings.url.startswith("unix:"):
            return None
        with self._lock:
            try:
                place = self._place(allocator)
                target = None if place is None else place.target(shard, component, pages)
                if place is None or target is None:
                    return None
                model, tenant = self._settings.model, self._settings.tenant
                with self._outages.noted():
                    filled = place.region.fill(
                        model, keys, {component.name: target}, deadline_ms=deadline_ms, tenant=tenant
                    )
            except Away:
                return None
            except (ForestageError, OSError, ValueError) as error:
                self._lost(allocator, error)
                return None
        there = filled.filled.get(component.name, range(0))
        return filled.pages.ready, [page in there for page in range(len(pages))]

    def close(self) -> None:
        """Have the service let go of all memory, but for a fill that is still waited for. Idempotent."""
        if self._lock.acquire(timeout=self._settings.query_ms / 1000):
            try:
                for place in self._places.values():
                    place.region.close()
                self._places.clear()
            finally:
                self._lock.release()

    def _place(self, allocator: Any) -> _Place | None:
        place = self._places.get(id(allocator))
        if place is not None or time.monotonic() < self._paused_until_s:
            return place
        self._paused_until_s = time.monotonic() + _PAUSE_S
        settings = self._settings
        with self._outages.noted():
            path = settings.regions_uds or self._client.info().fields.get("regions_uds")
        if not isinstance(path, str) or not path:
            return None
        addresses = [address_of(memoryview(mapping)) for mapping in allocator.mms]
        sizes = [len(mapping) for mapping in allocator.mms]
        starts = [0, *accumulate(sizes)][: len(sizes)]
        timeout_s = settings.query_ms / 1000
        region = MemoryRegion(settings.url, path, allocator.fds, token=settings.token, timeout_s=timeout_s)
        if region.size != sum(sizes):
            region.close()
            raise ValueError("the allocator's files have other sizes than its mappings")
        place = _Place(allocator, region, tuple(zip(addresses, sizes, starts, strict=True)))
        self._places[id(allocator)] = place
        self._paused_until_s = 0.0
        return place

    def _lost(self, allocator: Any, error: Exception) -> None:
        now = time.monotonic()
        _log.tell(f"Forestage: SGLang's pool is copied to, not filled by the service: {error}", now)
        # After a restart of the service the region is only to be registered anew.
        self._paused_until_s = now + (_PAUSE_GONE_S if isinstance(error, Gone) else _PAUSE_S)
        place = self._places.pop(id(allocator), None)
        if place is not None:
            place.region.close()


def _allocator_of(pool: Any) -> Any:
    """Return the shared-memory allocator that a host pool's memory is from, None if it is from another."""
    anchor = getattr(pool, "anchor_entry", None)
    pool = pool if anchor is None else anchor.host_pool
    allocator = getattr(pool, "allocator", None)
    fds, mappings = getattr(allocator, "fds", None), getattr(allocator, "mms", None)
    if isinstance(fds, list) and isinstance(mappings, list) and fds and len(fds) == len(mappings):
        return allocator
    return None
