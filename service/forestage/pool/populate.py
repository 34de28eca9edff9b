"""Back every byte of the pool with memory before the first request: one pass of faults, by several threads.

Law: when `populate` returns, every page of the range is allocated and mapped; when it cannot be, it raises StartError.
A touched page of a file that has no room would end the process with SIGBUS; the advice used here answers instead.
"""

import errno
import logging
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress

from forestage.core.errors import StartError
from forestage.pool import libc
from forestage.pool.limits import Roots, in_units
from forestage.pool.mount import Mount, MountKind

__all__ = ["advise_huge", "bind_to_node", "populate", "transparent_huge_bytes"]

_log = logging.getLogger("forestage.pool")

# Large enough that a step costs far more than starting it, small enough that progress is seen and a stop is quick.
STEP_BYTES = 64 << 20
# Touching holds the GIL, so its steps are short.
_TOUCH_BYTES = 4 << 20
# Zeroing is bound by memory bandwidth; more threads than this gave nothing on any machine it was tried on.
_MAX_THREADS = 8

Progress = Callable[[int, int], None]


def bind_to_node(address: int, size: int, node: int, roots: Roots) -> None:
    """Have the memory of the range come from one NUMA node. Only pages that are not there yet obey."""
    if not os.path.isdir(f"{roots.sys}/devices/system/node/node{node}"):
        raise StartError(f"pool.numa_node: need NUMA node {node}, this machine has no such node")
    number = libc.mbind(address, size, node)
    if number:
        raise StartError(f"pool.numa_node: need memory of NUMA node {node}, mbind failed: {os.strerror(number)}")


def advise_huge(address: int, size: int, setting: str, mount: Mount) -> None:
    """Tell the kernel whether huge pages are wanted; what came of it is asked afterwards."""
    if mount.kind is not MountKind.HUGE_PAGES:
        # A kernel built without them answers EINVAL, which is as good as not achieved.
        libc.madvise(address, size, libc.MADV_NOHUGEPAGE if setting == "off" else libc.MADV_HUGEPAGE)


def transparent_huge_bytes(address: int) -> int:
    """Return how many bytes of the mapping that starts at `address` are known to lie in transparent huge pages."""
    found = 0
    inside = False
    # A process that gave up root since its exec may not read this; then nothing is known.
    with suppress(PermissionError), open("/proc/self/smaps", encoding="utf-8", errors="replace") as smaps:
        for line in smaps:
            word, _, rest = line.partition(" ")
            if not word.endswith(":"):
                inside = word.startswith(f"{address:x}-")
            elif inside and word in {"ShmemPmdMapped:", "FilePmdMapped:"}:
                found += int(rest.split()[0]) * 1024
    return found


def populate(fd: int, mapping: mmap.mmap, mount: Mount, progress: Progress | None = None) -> None:
    """Fill the page tables of the whole mapping, from this thread's point of view in one blocking call.

    `progress(done, total)` is called in this thread after every step, in bytes; what it raises stops the work and is
    passed on. Raises StartError when memory or room runs out.
    """
    size = len(mapping)
    if mount.kind is MountKind.DISK:
        # A file system on a device allocates late; this asks for the blocks now.
        _reserve(fd, size, mount)
    started = reported = time.monotonic()
    address = libc.address_of(mapping)
    threads = max(2, min(_MAX_THREADS, len(os.sched_getaffinity(0))))
    reserved = mount.kind is MountKind.DISK
    with ThreadPoolExecutor(threads, thread_name_prefix="forestage-populate") as pool:
        steps = {
            pool.submit(libc.madvise, address + at, min(STEP_BYTES, size - at), libc.MADV_POPULATE_WRITE): at
            for at in range(0, size, STEP_BYTES)
        }
        done = 0
        try:
            for step in as_completed(steps):
                at = steps[step]
                length = min(STEP_BYTES, size - at)
                number = step.result()
                if number == errno.EINVAL:  # Linux before 5.14
                    if not reserved:
                        _reserve(fd, size, mount)
                        reserved = True
                    _touch(mapping, at, length)
                elif number:
                    raise _refused(number, size, mount)
                done += length
                if progress is not None:
                    progress(done, size)
                if time.monotonic() - reported >= 1:
                    reported = time.monotonic()
                    _log.info("prefaulting the pool: %s of %s", in_units(done), in_units(size))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    _log.info("prefaulted the pool: %s in %.2f s", in_units(size), time.monotonic() - started)


def _refused(number: int, size: int, mount: Mount) -> StartError:
    free = mount.free_bytes()
    left = "no more memory" if free is None else f"{in_units(free)} left after filling it up"
    return StartError(
        f"pool.bytes: need {in_units(size)} on {mount.directory}, have {left} ({os.strerror(number)} while prefaulting)"
    )


def _reserve(fd: int, size: int, mount: Mount) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        raise _refused(error.errno or errno.ENOSPC, size, mount) from error


def _touch(mapping: mmap.mmap, start: int, length: int) -> None:
    """Write to every page of a reserved range without changing a byte."""
    with memoryview(mapping) as memory:
        for at in range(start, start + length, _TOUCH_BYTES):
            end = min(at + _TOUCH_BYTES, start + length)
            memory[at : end : mmap.PAGESIZE] = memory[at : end : mmap.PAGESIZE]
