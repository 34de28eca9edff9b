"""The file system that is to hold the pool: what kind it is, its page size, and how much room it has."""

import os
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from forestage.pool import libc

__all__ = ["Mount", "MountKind"]

_MAGIC_TMPFS = 0x01021994
_MAGIC_RAMFS = 0x858458F6
_MAGIC_HUGETLBFS = 0x958458F6
_BASE_PAGE = 4096


class MountKind(StrEnum):
    """What the bytes of a file there are made of."""

    MEMORY = "memory"  # tmpfs: charged to whoever touches it first
    HUGE_PAGES = "huge pages"  # hugetlbfs: taken from a reserve, no swap
    DISK = "disk"  # page cache in front of a device


@dataclass(frozen=True, slots=True)
class Mount:
    """A file system. `directory` is the nearest directory that exists; `page_bytes` what file sizes are rounded to."""

    directory: str
    kind: MountKind
    page_bytes: int

    @classmethod
    def holding(cls, path: str) -> Self:
        """Find the file system on which a file at `path` (absolute) is or would be."""
        directory = os.path.dirname(path)
        while not os.path.isdir(directory) and directory != "/":
            directory = os.path.dirname(directory)
        magic = libc.filesystem_magic(directory)
        if magic == _MAGIC_HUGETLBFS:
            return cls(directory, MountKind.HUGE_PAGES, os.statvfs(directory).f_bsize)
        kind = MountKind.MEMORY if magic in {_MAGIC_TMPFS, _MAGIC_RAMFS} else MountKind.DISK
        return cls(directory, kind, _BASE_PAGE)

    def free_bytes(self) -> int | None:
        """Return the bytes a new file may take, None when the mount itself sets no limit."""
        room = os.statvfs(self.directory)
        if room.f_blocks == 0 and self.kind is not MountKind.DISK:
            return None
        # hugetlbfs counts blocks of one huge page and gives that as the fragment size too.
        return room.f_bavail * room.f_frsize

    def round_up(self, size: int) -> int:
        """Round a size in bytes up to whole pages of this file system."""
        return -(-size // self.page_bytes) * self.page_bytes
