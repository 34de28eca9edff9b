"""The pool file: one shared mapping that is reserved, backed and owned from start to end.

Law: while a PoolFile is open, every byte of it is backed by memory, its path is locked by this process, and the file
is never shortened. A start that fails leaves nothing behind.
"""

import logging
import mmap
import os
from contextlib import ExitStack, suppress
from typing import Self

from forestage.core.errors import StartError
from forestage.core.geometry import Geometry
from forestage.core.layout import ModelLayout
from forestage.pool.adoption import NotAdoptableError, check_file, check_tables, set_mode
from forestage.pool.blueprint import Blueprint
from forestage.pool.claim import Claim, create_owned, make_directory, remove_if_same
from forestage.pool.fence import WORDS_AS_IN_FILE
from forestage.pool.header import READY, STARTING, STOPPED, set_start, set_state
from forestage.pool.limits import Roots, in_units
from forestage.pool.pin import Pinned
from forestage.pool.populate import Progress
from forestage.pool.settings import PoolSettings
from forestage.pool.table import AdoptedPage, RegionTable

__all__ = ["PoolFile", "PoolSettings"]

_log = logging.getLogger("forestage.pool")


class PoolFile:
    """The open pool. `tables[i]` and region index i belong to `geometry.regions[i]`.

    `path` is absolute, `size` in bytes, `instance` 32 hex digits that no other start has, `generation` counts the
    starts at this path. `pinned` ("cuda", "mlock", "none") and `hugepages` ("hugetlbfs", "transparent", "none") say
    what was achieved, not what was asked for; `huge_bytes` how much lies in huge pages. `adopted[i]` are the pages that
    an earlier life left in region i, none if the file is new; `lent` the (region index, slot) of slots that it had lent
    to engines, which may be writing to them still: keep those out of use until the reservations have run out, then
    `clear` them.
    """

    def __init__(
        self,
        path: str,
        fd: int,
        mapping: mmap.mmap,
        geometry: Geometry,
        instance: str,
        generation: int,
        pinned: Pinned,
        huge: tuple[str, int],
    ) -> None:
        """Take over an opened, mapped and locked file. Use `create`."""
        self.path = path
        self.size = len(mapping)
        self.instance = instance
        self.generation = generation
        self.pinned = pinned.how
        self.hugepages, self.huge_bytes = huge
        self.geometry = geometry
        self._fd = fd
        self._mapping = mapping
        self._pin = pinned
        self._memory = memoryview(mapping)
        self.tables = [RegionTable(region, self._memory) for region in geometry.regions]
        # (offset, stride of a slot, offsets of the shards in it, payload bytes of a shard), looked up once a page.
        self._places = [
            (
                region.offset,
                region.component.slot_bytes,
                tuple(shard * region.component.shard_bytes for shard in range(region.component.shards)),
                region.component.bytes,
            )
            for region in geometry.regions
        ]
        self.adopted: list[list[AdoptedPage]] = [[] for _ in geometry.regions]
        self.lent: list[tuple[int, int]] = []
        self._closed = False

    @classmethod
    def create(
        cls,
        settings: PoolSettings,
        models: tuple[ModelLayout, ...],
        progress: Progress | None = None,
        *,
        roots: Roots | None = None,
    ) -> Self:
        """Adopt the pool file at the path, or create one; reserve and back all of it, pin it.

        Blocks for about 0.6 s a GiB, adopting 0.15 s: call it in a thread. `progress(done, total)`, in bytes, is called
        in this thread while memory is being backed; an exception from it stops the start. Raises StartError, in one
        line with need, have and setting, when the path is owned by another service or holds something else, or when
        mount, cgroup, memlock or machine cannot hold the pool. A start that ends so leaves an adopted file as it was.
        """
        settings.check_words()
        if not WORDS_AS_IN_FILE:
            raise StartError("pool.path: the pool file needs a little-endian machine")
        blueprint = Blueprint.draw(settings, models, roots or Roots())
        with ExitStack() as undo:
            for directory in make_directory(blueprint.path):
                undo.callback(_remove_empty, directory)
            old = Claim.take(blueprint)
            pool = None
            if old is not None:
                undo.callback(old.close)
                try:
                    pool = cls._adopt(old, blueprint, progress)
                except NotAdoptableError as reason:
                    _log.warning("the pool at %s is replaced, and its pages are gone: %s", blueprint.path, reason)
            if pool is None:
                pool = cls._make(_make_room(old, blueprint), blueprint, progress)
            undo.pop_all()
        _log.info(
            "pool of %s at %s, pinned: %s, huge pages: %s",
            in_units(pool.size),
            pool.path,
            pool.pinned,
            pool.hugepages,
        )
        return pool

    @classmethod
    def _make(cls, generation: int, blueprint: Blueprint, progress: Progress | None) -> Self:
        """Create the file at a path where there is none."""
        path = blueprint.path
        with ExitStack() as undo:
            fd = create_owned(path, blueprint.settings.mode)
            undo.callback(os.close, fd)
            undo.callback(remove_if_same, path, fd)
            instance = os.urandom(16)
            mapping = _map_new(fd, blueprint.head(fd, instance, generation), blueprint)
            undo.callback(mapping.close)
            huge = blueprint.back(fd, mapping, progress)
            blueprint.check_huge(huge[1])
            pinned = blueprint.pin(mapping)
            undo.callback(pinned.release)
            with memoryview(mapping) as memory:
                set_state(memory, READY)
            pool = cls(path, fd, mapping, blueprint.geometry, instance.hex(), generation, pinned, huge)
            undo.pop_all()
        return pool

    @classmethod
    def _adopt(cls, old: Claim, blueprint: Blueprint, progress: Progress | None) -> Self:
        """Go on with the file of an earlier life. Nothing in it changes before all that can fail is done."""
        check_file(old, blueprint)
        if old.held_bytes < blueprint.size:  # killed while its memory was being backed
            blueprint.check_room(blueprint.size - old.held_bytes)
        with ExitStack() as undo:
            mapping = blueprint.map(old.fd)
            undo.callback(mapping.close)
            check_tables(mapping, blueprint)
            huge = blueprint.back(old.fd, mapping, progress)
            try:
                blueprint.check_huge(huge[1])
            except StartError as error:
                raise NotAdoptableError(error.detail) from error
            pinned = blueprint.pin(mapping)
            undo.callback(pinned.release)
            set_mode(old, blueprint)
            instance, generation = os.urandom(16), old.generation + 1
            pool = cls(old.path, old.fd, mapping, blueprint.geometry, instance.hex(), generation, pinned, huge)
            pool._take_over(instance)
            undo.pop_all()
        return pool

    def _take_over(self, instance: bytes) -> None:
        """Make the tables and the header of an adopted file those of this start; a kill in between does no harm."""
        set_state(self._memory, STARTING)
        dropped = 0
        for index, table in enumerate(self.tables):
            found = table.recover()
            self.adopted[index] = found.pages
            self.lent += [(index, slot) for slot in found.lent]
            dropped += found.dropped
        set_start(self._memory, instance, self.generation)
        set_state(self._memory, READY)
        kept = sum(map(len, self.adopted))
        lent = f", {len(self.lent)} may still be written by engines" if self.lent else ""
        _log.info("adopted the pool at %s: %d pages kept, %d dropped%s", self.path, kept, dropped, lent)

    def shard_views(self, region_index: int, slot: int) -> tuple[memoryview, ...]:
        """Return one writable view a shard, each of exactly `Component.bytes` bytes. Valid as long as they are held."""
        offset, slot_bytes, shards, length = self._places[region_index]
        start = offset + slot * slot_bytes
        memory = self._memory
        if len(shards) == 1:
            return (memory[start : start + length],)
        return tuple([memory[start + shard : start + shard + length] for shard in shards])

    def slot_view(self, region_index: int, slot: int) -> memoryview:
        """Return a writable view of a whole slot, the padding behind each shard included."""
        offset, slot_bytes, _, _ = self._places[region_index]
        start = offset + slot * slot_bytes
        return self._memory[start : start + slot_bytes]

    def is_linked(self) -> bool:
        """Say whether the path still names this file, so that a reader that attaches now sees it."""
        try:
            there, here = os.lstat(self.path), os.fstat(self._fd)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def close(self) -> None:
        """Unpin, unmap and give up the ownership; the file stays. Idempotent.

        While a view handed out earlier lives, mapping and lock live too: who can still write here is still the owner.
        """
        if self._closed:
            return
        self._closed = True
        self._pin.release()
        set_state(self._memory, STOPPED)
        for table in self.tables:
            table.release()
        self._memory.release()
        os.close(self._fd)
        with suppress(BufferError):
            self._mapping.close()
        # If it could not be closed: it holds a duplicate of the descriptor, hence the lock, until the last view goes.
        del self._mapping


def _make_room(old: Claim | None, blueprint: Blueprint) -> int:
    """Check that the pool fits and remove the file of an earlier start; return the generation of this one.

    Nothing is removed before the checks have passed. The resident pages of the old file go with it.
    """
    if old is None:
        blueprint.check_room(blueprint.size)
        return 1
    freed, remark = old.freed_by_removal(blueprint.roots)
    blueprint.check_room(blueprint.size, freed, remark)
    old.remove()
    # Now it shows whether a process that we could not see keeps the old file's memory.
    blueprint.check_room(blueprint.size, remark=" (another process still maps the old pool file)")
    return old.generation + 1


def _map_new(fd: int, head: bytes, blueprint: Blueprint) -> mmap.mmap:
    """Give the file its header before its size, so that it is a pool, or empty, whenever the process dies."""
    try:
        if not blueprint.in_huge_pages:
            os.pwrite(fd, head, 0)
        os.ftruncate(fd, blueprint.size)
    except OSError as error:
        raise blueprint.unmappable(error) from error
    mapping = blueprint.map(fd)
    if blueprint.in_huge_pages:
        # hugetlbfs knows no write(); mmap has reserved the pages.
        mapping[: len(head)] = head
    return mapping


def _remove_empty(directory: str) -> None:
    with suppress(OSError):
        os.rmdir(directory)
