"""System calls that Python lacks, or makes only with the GIL held. Each returns an errno, 0 when it worked."""

import ctypes
import errno
import mmap
import platform

__all__ = [
    "MADV_HUGEPAGE",
    "MADV_NOHUGEPAGE",
    "MADV_POPULATE_WRITE",
    "address_of",
    "filesystem_magic",
    "madvise",
    "mbind",
    "mlock",
    "munlock",
]

MADV_HUGEPAGE = 14
MADV_NOHUGEPAGE = 15
MADV_POPULATE_WRITE = 23  # Linux 5.14

_MPOL_BIND = 2
_MBIND_NUMBER = {"x86_64": 237, "aarch64": 235, "riscv64": 235, "ppc64le": 259, "s390x": 268}
_MAX_NODES = 1024  # what MAX_NUMNODES can be configured to

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.statfs.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
_libc.syscall.restype = ctypes.c_long


def address_of(mapping: mmap.mmap) -> int:
    """Return the address of a writable mapping; valid until it is closed."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def madvise(address: int, length: int, advice: int) -> int:
    """Advise the kernel about a range of memory, without the GIL."""
    return ctypes.get_errno() if _libc.madvise(address, length, advice) else 0


def mlock(address: int, length: int) -> int:
    """Keep a range of memory from being swapped, without the GIL."""
    return ctypes.get_errno() if _libc.mlock(address, length) else 0


def munlock(address: int, length: int) -> int:
    """Undo `mlock`."""
    return ctypes.get_errno() if _libc.munlock(address, length) else 0


def mbind(address: int, length: int, node: int) -> int:
    """Have the pages of a range, untouched so far, come from one NUMA node."""
    number = _MBIND_NUMBER.get(platform.machine())
    if number is None:
        return errno.ENOSYS
    if node >= _MAX_NODES:
        return errno.EINVAL
    mask = (ctypes.c_ubyte * (_MAX_NODES // 8))()
    mask[node // 8] = 1 << node % 8
    # The kernel takes one bit less than it is told.
    failed = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(length),
        ctypes.c_int(_MPOL_BIND),
        ctypes.byref(mask),
        ctypes.c_ulong(_MAX_NODES + 1),
        ctypes.c_uint(0),
    )
    return ctypes.get_errno() if failed else 0


def filesystem_magic(path: str) -> int:
    """Return the type number of the file system that holds `path` (statfs(2)); OSError when it cannot be asked."""
    fields = (ctypes.c_long * 64)()  # larger than struct statfs anywhere; the type is its first word
    if _libc.statfs(path.encode(), fields):
        number = ctypes.get_errno()
        raise OSError(number, "statfs failed", path)
    return int(fields[0]) & 0xFFFFFFFF
