"""The pool file: one shared mapping that is reserved, backed and owned from start to end.

Law: while a PoolFile is open, every byte of it is backed by memory, its path is locked by this process, and the file
is never shortened. A start that fails leaves nothing behind.
"""

import logging
import mmap
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Self

from forestage.core.errors import StartError
from forestage.core.geometry import Geometry, GeometryError, lay_out
from forestage.core.layout import ModelLayout
from forestage.pool import libc, limits
from forestage.pool.claim import Claim, create_owned, make_directory, remove_if_same
from forestage.pool.limits import Roots, in_units
from forestage.pool.mount import Mount, MountKind
from forestage.pool.pin import Pinned, pin_chunks, pin_memory
from forestage.pool.populate import Progress, advise_huge, bind_to_node, populate, transparent_huge_bytes
from forestage.pool.table import READY, STARTING, STOPPED, RegionTable, encode_header, set_state

__all__ = ["PoolFile", "PoolSettings"]

_log = logging.getLogger("forestage.pool")

_HUGE_PAGE = 2 << 20


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Section `[pool]` of the configuration.

    `bytes` is an upper bound for the file; `pin`: auto, cuda, mlock or none; `hugepages`: auto, on or off;
    `numa_node`: -1 leaves the choice to the kernel; `mode`: permissions of the file, whatever the umask.
    """

    path: str
    bytes: int
    pin: str = "auto"
    hugepages: str = "auto"
    numa_node: int = -1
    mode: int = 0o660


class PoolFile:
    """The open pool. `tables[i]` and region index i belong to `geometry.regions[i]`.

    `path` is absolute, `size` in bytes, `instance` 32 hex digits that no other start has, `generation` counts the
    starts at this path. `pinned` ("cuda", "mlock", "none") and `hugepages` ("hugetlbfs", "transparent", "none") say
    what was achieved, not what was asked for; `huge_bytes` how much lies in huge pages.
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
        self._closed = False

    @classmethod
    def create(
        cls,
        settings: PoolSettings,
        models: tuple[ModelLayout, ...],
        progress: Callable[[int, int], None] | None = None,
        *,
        roots: Roots | None = None,
    ) -> Self:
        """Create the pool file, reserve and back all of it, pin it. Blocks for about 0.6 s a GiB: call it in a thread.

        `progress(done, total)`, in bytes, is called in this thread while memory is being backed; an exception from it
        stops the start. Raises StartError, in one line with need, have and setting, when the path is owned by another
        service or holds something else, or when mount, cgroup, memlock or machine cannot hold the pool.
        """
        _check_words(settings)
        roots = roots or Roots()
        path = os.path.abspath(settings.path)
        mount = Mount.holding(path)
        geometry, size = _size(settings, models, mount)
        instance = os.urandom(16)
        with ExitStack() as undo:
            for directory in make_directory(path):
                undo.callback(_remove_empty, directory)
            generation = _make_room(path, size, settings, mount, roots)
            fd = create_owned(path, settings.mode)
            undo.callback(os.close, fd)
            undo.callback(remove_if_same, path, fd)
            try:
                head = encode_header(
                    geometry, instance=instance, generation=generation, file_bytes=size, state=STARTING
                )
            except ValueError as error:
                raise StartError(f"models: {error}") from error
            mapping = _map(fd, size, head, mount)
            undo.callback(mapping.close)
            pinned, huge = _back(fd, mapping, geometry, settings, mount, progress, roots)
            undo.callback(pinned.release)
            with memoryview(mapping) as memory:
                set_state(memory, READY)
            pool = cls(path, fd, mapping, geometry, instance.hex(), generation, pinned, huge)
            undo.pop_all()
        _log.info("pool of %s at %s, pinned: %s, huge pages: %s", in_units(size), path, pinned.how, huge[0])
        return pool

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


def _check_words(settings: PoolSettings) -> None:
    if settings.pin not in {"auto", "cuda", "mlock", "none"}:
        raise StartError(f"pool.pin: {settings.pin!r} is none of auto, cuda, mlock, none")
    if settings.hugepages not in {"auto", "on", "off"}:
        raise StartError(f"pool.hugepages: {settings.hugepages!r} is none of auto, on, off")


def _size(settings: PoolSettings, models: tuple[ModelLayout, ...], mount: Mount) -> tuple[Geometry, int]:
    """Lay the file out; its size is a whole number of the mount's pages and at most `pool.bytes`."""
    have, remark = settings.bytes, ""
    if mount.kind is MountKind.HUGE_PAGES:
        have, remark = have // mount.page_bytes * mount.page_bytes, f" in whole pages of {in_units(mount.page_bytes)}"
    try:
        geometry = lay_out(models, have)
    except GeometryError as error:
        raise StartError(f"pool.bytes: {error}{remark}") from error
    return geometry, mount.round_up(geometry.used_bytes)


def _make_room(path: str, size: int, settings: PoolSettings, mount: Mount, roots: Roots) -> int:
    """Check that the pool fits and remove the file of an earlier start; return the generation of this one.

    Nothing is removed before the checks have passed. The resident pages of the old file go with it.
    """
    old = Claim.take(path)
    if old is None:
        _check_limits(size, 0, "", settings, mount, roots)
        return 1
    try:
        freed, remark = old.freed_by_removal(roots)
        _check_limits(size, freed, remark, settings, mount, roots)
        old.remove()
    finally:
        old.close()
    # Now it shows whether a process that we could not see keeps the old file's memory.
    _check_limits(size, 0, " (another process still maps the old pool file)", settings, mount, roots)
    return old.header.generation + 1 if old.header else 1


def _check_limits(size: int, freed: int, remark: str, settings: PoolSettings, mount: Mount, roots: Roots) -> None:
    limits.check_mount(mount, size, freed, remark)
    limits.check_memory(mount, size, freed, roots)
    if settings.pin == "mlock":
        limits.check_memlock(size, roots)


def _map(fd: int, size: int, head: bytes, mount: Mount) -> mmap.mmap:
    """Give the file its header before its size, so that it is a pool, or empty, whenever the process dies."""
    try:
        if mount.kind is not MountKind.HUGE_PAGES:
            os.pwrite(fd, head, 0)
        os.ftruncate(fd, size)
        mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise StartError(
            f"pool.bytes: need {in_units(size)} on {mount.directory}, cannot be mapped: {error.strerror}"
        ) from error
    if mount.kind is MountKind.HUGE_PAGES:
        # hugetlbfs knows no write(); mmap has reserved the pages.
        mapping[: len(head)] = head
    return mapping


def _back(
    fd: int,
    mapping: mmap.mmap,
    geometry: Geometry,
    settings: PoolSettings,
    mount: Mount,
    progress: Progress | None,
    roots: Roots,
) -> tuple[Pinned, tuple[str, int]]:
    """Put memory behind every byte: placement, page size, content and pinning, in this order."""
    size = len(mapping)
    address = libc.address_of(mapping)
    if settings.numa_node >= 0:
        bind_to_node(address, size, settings.numa_node, roots)
    advise_huge(address, size, settings.hugepages, mount)
    populate(fd, mapping, mount, progress)
    if mount.kind is MountKind.HUGE_PAGES:
        huge = ("hugetlbfs", size)
    else:
        found = transparent_huge_bytes(address)
        # The header was there before the advice, and the end need not fill a huge page.
        if settings.hugepages == "on" and (found == 0 or found < size - 2 * _HUGE_PAGE):
            raise StartError(
                f"pool.hugepages: need {in_units(size)} in huge pages, have {in_units(found)} on {mount.directory}; "
                "mount it with huge=advise, or use hugetlbfs"
            )
        huge = ("transparent" if found else "none", found)
    return pin_memory(address, pin_chunks(geometry.regions, size), settings.pin), huge


def _remove_empty(directory: str) -> None:
    with suppress(OSError):
        os.rmdir(directory)
