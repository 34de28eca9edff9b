"""The shared pool as rows of an engine's host memory: where a row's page lies now, and how it comes across.

Law: a row is filled with whole bytes of the key that was asked for, or reported as not filled. Rows and pages have one
size, else nothing of the pool is used.
"""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass

from forestage_client._memory import address_of
from forestage_client._pool_format import PoolFormatError, RegionInfo
from forestage_client.integrations._outages import Mismatch
from forestage_client.integrations._resident_pages import ResidentPages
from forestage_client.pool_view import PoolView, Stale

__all__ = ["Attachment", "PoolRows", "RowGroup", "RowModel"]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One KV cache group of the engine. `window`: how many rows back it looks, None for all of them."""

    tokens: int
    window: int | None


@dataclass(frozen=True, slots=True)
class RowModel:
    """What the engine has. `components[i]` is the component of group i, None: the model's, in order."""

    name: str
    row_bytes: int
    groups: tuple[RowGroup, ...]
    components: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Attachment:
    """The pool as it was attached; `regions[i]` and `pages[i]` are those of group i. `file` tells it from another."""

    view: PoolView
    regions: tuple[RegionInfo, ...]
    pages: tuple[ResidentPages, ...]
    file: tuple[int, int]

    def find(self, group: int, key: bytes) -> int | None:
        """Return the slot that has a page now, None when it is not in the pool."""
        slot = self.pages[group].find(key) if group < len(self.pages) else None
        if slot is None:
            return None
        try:
            self.view.stamp(self.regions[group].model, self.regions[group].component, slot, key)
        except Stale:
            return None
        return slot

    def fill(self, group: int, key: bytes, slot: int, target: int) -> bool:
        """Copy a page to the address `target`, without the GIL; say whether it is there in whole."""
        region = self.regions[group]
        try:
            stamp = self.view.stamp(region.model, region.component, slot, key)
            for shard in self.view.shard_views(region.model, region.component, slot):
                ctypes.memmove(target, address_of(shard), len(shard))
                target += len(shard)
            self.view.check(stamp)
        except Stale:
            return False
        return True


class PoolRows:
    """Follows the pool file at a path. `attach` is for one thread, what it returns for any."""

    def __init__(self, path: str, model: RowModel) -> None:
        """Open nothing yet."""
        self._path = path
        self._model = model
        self._attachment: Attachment | None = None
        # With the view, so that no other file can get the same inode meanwhile.
        self._refused: tuple[tuple[int, int], str, PoolView] | None = None

    def attach(self) -> Attachment | None:
        """Return the pool as it is now, with what is resident; None while there is none.

        Costs a look at the path and at the generations of all slots; asks nobody. Raises Mismatch for a pool without
        this model, and OSError for one that may not be read.
        """
        file = _file_at(self._path)
        if file is None:
            self._attachment = None
            return None
        attachment = self._attachment
        if attachment is None or attachment.file != file:
            self._attachment = None
            attachment = self._open(file)
            if attachment is None:
                return None
        for pages in attachment.pages:
            pages.refresh()
        self._attachment = attachment
        return attachment

    def close(self) -> None:
        """Let go of the pool; whoever has an attachment keeps the memory. Idempotent."""
        self._attachment = self._refused = None

    def _open(self, file: tuple[int, int]) -> Attachment | None:
        if self._refused is not None and self._refused[0] == file:
            raise Mismatch(self._refused[1])
        try:
            view = _view(self._path)
        except (FileNotFoundError, PoolFormatError):
            return None  # about to be made, or replaced
        if _file_at(self._path) != file:
            return None
        try:
            regions = _regions(view, self._model)
        except Mismatch as error:
            self._refused = (file, str(error), view)
            raise
        pages = tuple(ResidentPages(view, region.model, region.component) for region in regions)
        return Attachment(view, regions, pages, file)


def _view(path: str) -> PoolView:
    try:
        return PoolView(path, writable=True)
    except PermissionError:
        return PoolView(path)


def _regions(view: PoolView, model: RowModel) -> tuple[RegionInfo, ...]:
    components = view.regions.get(model.name)
    if components is None:
        raise Mismatch(f"the pool has no model {model.name!r}, but {', '.join(sorted(view.regions))}")
    names: Sequence[str] = tuple(components) if model.components is None else model.components
    unknown = [name for name in names if name not in components]
    if unknown:
        raise Mismatch(f"model {model.name!r} has no component {unknown[0]!r}, but {', '.join(components)}")
    if len(names) != len(model.groups) or set(names) != set(components):
        raise Mismatch(f"model {model.name!r} has {len(components)} components, the engine {len(model.groups)} groups")
    regions = tuple(components[name] for name in names)
    for region, group in zip(regions, model.groups, strict=True):
        what = f"{region.component} of model {model.name!r}"
        if region.payload_bytes != model.row_bytes:
            raise Mismatch(
                f"a page of {what} has {region.payload_bytes} bytes, a chunk of the engine {model.row_bytes}"
            )
        if region.page_tokens != group.tokens:
            raise Mismatch(f"a page of {what} has {region.page_tokens} tokens, a chunk of the engine {group.tokens}")
        if region.covers == "tail" and (group.window is None or group.window > region.window):
            looks = "all" if group.window is None else group.window
            raise Mismatch(f"{what} covers a tail of {region.window} pages, its group needs {looks}")
    return regions


def _file_at(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino
