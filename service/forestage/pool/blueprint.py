"""What the pool file is to be, before there is one: its size and geometry, the mount it lies on, the memory behind it.

Law: nothing here creates, names or removes a file; what is done to the memory of one is undone by unmapping it.
"""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from forestage.core.errors import StartError
from forestage.core.geometry import Geometry, GeometryError, lay_out
from forestage.core.layout import ModelLayout
from forestage.pool import libc, limits
from forestage.pool.header import STARTING, Origin, encode_header, encode_records
from forestage.pool.limits import Roots, in_units
from forestage.pool.mount import Mount, MountKind
from forestage.pool.pin import Pinned, pin_chunks, pin_memory
from forestage.pool.populate import Progress, advise_huge, bind_to_node, populate, transparent_huge_bytes
from forestage.pool.settings import PoolSettings

__all__ = ["Blueprint"]

_HUGE_PAGE = 2 << 20


@dataclass(frozen=True, slots=True)
class Blueprint:
    """One start's idea of the pool file. `path` is absolute, `size` in bytes, `records` its region records."""

    path: str
    size: int
    geometry: Geometry
    records: bytes
    settings: PoolSettings
    mount: Mount
    roots: Roots

    @classmethod
    def draw(cls, settings: PoolSettings, models: tuple[ModelLayout, ...], roots: Roots) -> Self:
        """Lay the file out; its size is a whole number of the mount's pages and at most `pool.bytes`.

        Raises StartError when a slot of every component does not fit, or a name does not.
        """
        path = os.path.abspath(settings.path)
        mount = Mount.holding(path)
        have, remark = settings.bytes, ""
        if mount.kind is MountKind.HUGE_PAGES:
            have = have // mount.page_bytes * mount.page_bytes
            remark = f" in whole pages of {in_units(mount.page_bytes)}"
        try:
            geometry = lay_out(models, have)
        except GeometryError as error:
            raise StartError(f"pool.bytes: {error}{remark}") from error
        try:
            records = encode_records(geometry)
        except ValueError as error:
            raise StartError(f"models: {error}") from error
        return cls(path, mount.round_up(geometry.used_bytes), geometry, records, settings, mount, roots)

    @property
    def on_disk(self) -> bool:
        return self.mount.kind is MountKind.DISK

    @property
    def in_huge_pages(self) -> bool:
        return self.mount.kind is MountKind.HUGE_PAGES

    def origin(self, fd: int) -> Origin:
        """Say what a file behind `fd` that is made now comes from."""
        try:
            text = Path(f"{self.roots.proc}/sys/kernel/random/boot_id").read_text().strip()
            boot = bytes.fromhex(text.replace("-", ""))
        except (OSError, ValueError):
            boot = b""
        return Origin(self.settings.numa_node, os.fstat(fd).st_ino, boot.ljust(16, b"\0")[:16])

    def head(self, fd: int, instance: bytes, generation: int) -> bytes:
        """Return header and records of a file that is being made."""
        return encode_header(
            self.geometry,
            instance=instance,
            generation=generation,
            file_bytes=self.size,
            state=STARTING,
            origin=self.origin(fd),
        )

    def check_room(self, need: int, freed: int = 0, remark: str = "") -> None:
        """Raise StartError when mount, machine, cgroups or memlock have no room for `need` more bytes."""
        limits.check_mount(self.mount, need, freed, remark)
        limits.check_memory(self.mount, need, freed, self.roots)
        if self.settings.pin == "mlock":
            limits.check_memlock(self.size, self.roots)

    def map(self, fd: int) -> mmap.mmap:
        """Map the whole file behind `fd`, which has its size. Raises StartError."""
        try:
            return mmap.mmap(fd, self.size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise self.unmappable(error) from error

    def unmappable(self, error: OSError) -> StartError:
        """Build the line of a file that cannot be given its size or be mapped."""
        need, directory = in_units(self.size), self.mount.directory
        return StartError(f"pool.bytes: need {need} on {directory}, cannot be mapped: {error.strerror}")

    def back(self, fd: int, mapping: mmap.mmap, progress: Progress | None) -> tuple[str, int]:
        """Put memory behind every byte, on the node and in pages as wanted; bytes that are there stay.

        Returns what was achieved: "hugetlbfs", "transparent" or "none", and how many bytes lie in huge pages.
        Raises StartError.
        """
        address = libc.address_of(mapping)
        settings = self.settings
        if settings.numa_node >= 0:
            bind_to_node(address, self.size, settings.numa_node, self.roots)
        advise_huge(address, self.size, settings.hugepages, self.mount)
        populate(fd, mapping, self.mount, progress)
        if self.in_huge_pages:
            return "hugetlbfs", self.size
        found = transparent_huge_bytes(address)
        return "transparent" if found else "none", found

    def check_huge(self, found: int) -> None:
        """Raise StartError when huge pages were asked for and only `found` bytes lie in them."""
        # The header was there before the advice, and the end need not fill a huge page.
        if self.settings.hugepages == "on" and (found == 0 or found < self.size - 2 * _HUGE_PAGE):
            raise StartError(
                f"pool.hugepages: need {in_units(self.size)} in huge pages, have {in_units(found)} "
                f"on {self.mount.directory}; mount it with huge=advise, or use hugetlbfs"
            )

    def pin(self, mapping: mmap.mmap) -> Pinned:
        """Pin the mapped file as `pool.pin` says. Raises StartError, with nothing pinned."""
        return pin_memory(libc.address_of(mapping), pin_chunks(self.geometry.regions, self.size), self.settings.pin)
