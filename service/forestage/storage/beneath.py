"""Opening what lies below a directory without ever being led out of it.

Law: of a path below a root every part is taken as it is; none that is a symbolic link is followed, whoever puts it
there and whenever. The root itself, and the way to it, are the operator's, who may use links.
"""

import contextlib
import ctypes
import errno
import os
import stat
from functools import cache

__all__ = ["FOLDER_FLAGS", "make_beneath", "open_beneath"]

FOLDER_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
_PATH_FLAGS = os.O_PATH | os.O_CLOEXEC

_SYS_OPENAT2 = 437  # the same on every architecture
_AT_FDCWD = -100
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x02, 0x04, 0x08
_RESOLVE = _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_beneath(root: str, path: str, flags: int) -> int:
    """Open the file or folder `path`, which begins with `root`, and return its descriptor.

    Raises OSError, ELOOP where a part of the path below the root is a symbolic link. Blocking.
    """
    if path == root:
        return os.open(root, flags & ~os.O_NOFOLLOW)
    relative = path[len(root) + 1 :]
    top = os.open(root, _PATH_FLAGS | os.O_DIRECTORY)
    try:
        if not _has_openat2():
            return _open_by_steps(top, relative, flags)
        if "\0" in relative:
            raise ValueError("embedded null byte")
        how = _OpenHow(flags, 0, _RESOLVE)
        descriptor: int = _libc().syscall(
            ctypes.c_long(_SYS_OPENAT2), top, os.fsencode(relative), ctypes.byref(how), ctypes.c_size_t(24)
        )
        if descriptor < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
        return descriptor
    finally:
        os.close(top)


def make_beneath(root: str, folder: str) -> int:
    """Make the root and the folder `folder` below it where they are missing; return a descriptor of the folder.

    Raises OSError as `open_beneath` does. Blocking.
    """
    try:
        return open_beneath(root, folder, FOLDER_FLAGS)
    except FileNotFoundError:
        os.makedirs(root, exist_ok=True)
    here = os.open(root, FOLDER_FLAGS)
    for name in folder[len(root) + 1 :].split("/") if folder != root else ():
        above = here
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=above)
            here = _open_step(above, name, FOLDER_FLAGS)
        finally:
            os.close(above)
    return here


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@cache
def _has_openat2() -> bool:
    """Say whether the kernel knows the call and lets us make it; some sandboxes do not."""
    how = _OpenHow(_PATH_FLAGS, 0, 0)
    descriptor: int = _libc().syscall(
        ctypes.c_long(_SYS_OPENAT2), _AT_FDCWD, b"/", ctypes.byref(how), ctypes.c_size_t(24)
    )
    if descriptor < 0:
        return False
    os.close(descriptor)
    return True


def _open_by_steps(top: int, relative: str, flags: int) -> int:
    *above, name = relative.split("/")
    here = os.dup(top)
    try:
        for part in above:
            here, parent = _open_step(here, part, _PATH_FLAGS | os.O_DIRECTORY), here
            os.close(parent)
        return _open_step(here, name, flags)
    finally:
        os.close(here)


def _open_step(folder: int, name: str, flags: int) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise
