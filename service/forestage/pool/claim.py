"""Who owns the pool file at a path: whoever holds its flock, as long as any descriptor or mapping of his lives.

Law: a file is only removed by the holder of its lock, only while the path still names it, and only when it is a pool,
was one, or is empty. Everything else at the path, or beside it, is left alone.
"""

import errno
import fcntl
import os
import stat
from dataclasses import dataclass
from typing import Self

from forestage.core.errors import StartError
from forestage.core.geometry import HEADER_BYTES
from forestage.pool.blueprint import Blueprint
from forestage.pool.header import Header, HeaderError, last_generation, read_header
from forestage.pool.limits import Roots

__all__ = ["Claim", "create_owned", "make_directory", "remove_if_same"]

_ATTEMPTS = 20


@dataclass(slots=True)
class Claim:
    """An existing pool file whose lock this process holds.

    `header` is None when the file is empty or damaged, and `damage` says so. `generation` is that of the last start
    there, 0 if unknown; `records` the region records as they stand; `size` and `held_bytes` are in bytes. The lock ends
    with `close` (idempotent), or with the process.
    """

    path: str
    fd: int
    header: Header | None
    damage: str
    generation: int
    records: bytes
    size: int
    held_bytes: int

    @classmethod
    def take(cls, blueprint: Blueprint) -> Self | None:
        """Lock the pool file at the blueprint's path; None when there is none.

        Raises StartError when another service owns it, when it is not a pool, or when it may not be opened.
        """
        path = blueprint.path
        for _ in range(_ATTEMPTS):
            fd = _open_existing(path)
            if fd is None:
                return None
            try:
                _lock(fd, path)
                if not _names(path, fd):
                    continue  # its owner replaced it between the opening and the lock
                claim = cls._read(fd, blueprint)
                fd = -1
                return claim
            finally:
                if fd >= 0:
                    os.close(fd)
        raise StartError(f"pool.path: {path} is being replaced again and again by other services")

    @classmethod
    def _read(cls, fd: int, blueprint: Blueprint) -> Self:
        status = os.fstat(fd)
        size, held = status.st_size, status.st_blocks * 512
        # hugetlbfs gives a file its size before the first byte can be written.
        if size == 0 or (blueprint.in_huge_pages and held == 0):
            return cls(blueprint.path, fd, None, "it is empty", 0, b"", size, held)
        # hugetlbfs can be read, but not written, without a mapping. A megabyte holds the records of 4000 regions.
        head = os.pread(fd, min(size, HEADER_BYTES + (1 << 20)), 0)
        records = head[HEADER_BYTES : HEADER_BYTES + len(blueprint.records)]
        if blueprint.in_huge_pages:
            held = size  # all of it is reserved for this file from its mapping on
        try:
            header = read_header(head)
        except HeaderError as error:
            # Scribbled over, and yet without doubt a pool: the records behind the header, or a size to the byte.
            ours = records == blueprint.records or (size == blueprint.size and status.st_uid == os.geteuid())
            if error.foreign and not ours:
                raise StartError(
                    f"pool.path: {blueprint.path} is {error}; move it away or choose another path"
                ) from error
            damage = "its header was overwritten" if error.foreign else str(error)
            return cls(blueprint.path, fd, None, damage, last_generation(head), records, size, held)
        return cls(blueprint.path, fd, header, "", header.generation, records, size, held)

    def freed_by_removal(self, roots: Roots) -> tuple[int, str]:
        """Return how many bytes come back when the file goes, and a remark when some process keeps them by its mapping.

        Processes of other users or containers cannot be seen: what is really free is asked again after the removal.
        """
        pids = _mapped_by(self.fd, roots)
        if not pids:
            return self.held_bytes, ""
        named = ", ".join(pids[:5])
        return 0, f" (the old pool file there is still mapped by process {named})"

    def remove(self) -> None:
        """Remove the file from its path and let go of it. Mappings of readers stay valid."""
        remove_if_same(self.path, self.fd)
        self.close()

    def close(self) -> None:
        """Let go of the lock; the file stays. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def make_directory(path: str) -> list[str]:
    """Create the missing directories above `path`; return those, outermost first. Raises StartError."""
    missing = []
    directory = os.path.dirname(path)
    while not os.path.lexists(directory):
        missing.append(directory)
        directory = os.path.dirname(directory)
    made: list[str] = []
    for name in reversed(missing):
        try:
            os.mkdir(name)
        except FileExistsError:
            continue
        except OSError as error:
            for own in reversed(made):
                os.rmdir(own)
            raise StartError(_denied(f"the directory {name}", directory, error)) from error
        made.append(name)
    return made


def create_owned(path: str, mode: int) -> int:
    """Create an empty file at `path` with exactly these permissions and lock it; return its descriptor.

    Raises StartError when the path is taken or the directory does not let us.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError as error:
        raise StartError(f"pool.path: another service has just taken {path}") from error
    except OSError as error:
        raise StartError(_denied(path, os.path.dirname(path), error)) from error
    try:
        _lock(fd, path)
        if not _names(path, fd):
            raise StartError(f"pool.path: another service has just taken {path}")
        # Not by the mode of open: the umask would take bits from it that the engine's user needs.
        os.fchmod(fd, mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def remove_if_same(path: str, fd: int) -> None:
    """Remove what is at `path` if it is the file behind `fd`."""
    if _names(path, fd):
        os.unlink(path)


def _open_existing(path: str) -> int | None:
    try:
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            raise StartError(f"pool.path: {path} is a symbolic link; name the file itself")
        if not stat.S_ISREG(found.st_mode):
            raise StartError(f"pool.path: {path} is not a regular file")
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise StartError(f"pool.path: a part of {path} is not a directory") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StartError(f"pool.path: {path} is a symbolic link; name the file itself") from error
        raise StartError(_denied(path, path, error)) from error


def _lock(fd: int, path: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StartError(f"pool.path: {path} is in use by another running service") from error


def _names(path: str, fd: int) -> bool:
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _mapped_by(fd: int, roots: Roots) -> list[str]:
    status = os.fstat(fd)
    mark = f" {os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x} {status.st_ino} "
    found = []
    for pid in os.listdir(roots.proc):
        if not pid.isdigit():
            continue
        try:
            with open(f"{roots.proc}/{pid}/maps", encoding="utf-8", errors="replace") as maps:
                if any(mark in line for line in maps):
                    found.append(pid)
        except OSError:
            continue  # gone meanwhile, or not ours to see
    return found


def _denied(what: str, owned: str, error: OSError) -> str:
    uid = os.geteuid()
    try:
        status = os.stat(owned)
        owner = f"; {owned} belongs to uid {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}"
    except OSError:
        owner = ""
    return f"pool.path: cannot open or create {what} as uid {uid}: {error.strerror}{owner}"
