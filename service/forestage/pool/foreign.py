"""Memory of another process, as descriptors that it has passed: pages are written to it, nothing is read.

It is written with pwrite and never mapped. A mapping would let whoever shortens the file kill the service (SIGBUS), and
the seal that forbids shortening cannot be asked for: SGLang makes its memory file without allowing seals.

Law: the descriptors are open as long as somebody uses the memory or it is not closed; once `close` has been called
nothing more is begun, and once `users` is 0 as well nothing is written any more.
"""

import fcntl
import os
import stat
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from forestage.core.errors import BadRequestError, GoneError
from forestage.pool import libc

__all__ = ["ForeignMemory"]

_TMPFS_MAGIC = 0x01021994


class ForeignMemory:
    """Files one behind another, as one range of `size` bytes. `ends[i]` is one behind the last byte of file i.

    All but `write` is for one thread.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        """Take the descriptors over, also where BadRequestError is raised because they are no memory to write to."""
        self._fds = tuple(fds)
        self.users = 0
        self._closed = False
        try:
            sizes = [_checked_size(fd) for fd in self._fds]
        except BaseException:
            self._release()
            raise
        self.ends = tuple(accumulate(sizes))

    @property
    def size(self) -> int:
        return self.ends[-1]

    @property
    def closed(self) -> bool:
        return self._closed

    def use(self) -> None:
        """Keep the descriptors open until `done_with`. Raises GoneError when it is closed."""
        if self._closed:
            raise GoneError("the connection of this region has ended", slug="region-gone")
        self.users += 1

    def done_with(self) -> None:
        """End a use."""
        self.users -= 1
        self._close_unused()

    def close(self) -> None:
        """Begin no use any more. Idempotent."""
        if not self._closed:
            self._closed = True
            self._close_unused()

    def write(self, offsets: Sequence[int], sizes: Sequence[int], data: memoryview) -> None:
        """Write `data` in runs of `sizes` bytes to `offsets`, without the GIL; whoever calls uses the memory.

        Each run lies in one file. Raises OSError, also for a file that was cut short.
        """
        lengths = [os.fstat(fd).st_size for fd in self._fds]
        begin = 0
        for offset, size in zip(offsets, sizes, strict=True):
            file = bisect_right(self.ends, offset)
            at = offset - self.ends[file - 1] if file else offset
            # Writing behind its end would make it longer again, with memory of ours.
            if lengths[file] < at + size:
                raise OSError("the file was shortened")
            run = data[begin : begin + size]
            begin += size
            while (written := os.pwrite(self._fds[file], run, at)) < len(run):
                run = run[written:]
                at += written

    def _close_unused(self) -> None:
        if self._closed and not self.users:
            self._release()

    def _release(self) -> None:
        fds, self._fds = self._fds, ()
        for fd in fds:
            os.close(fd)


def _checked_size(fd: int) -> int:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or libc.filesystem_magic(f"/proc/self/fd/{fd}") != _TMPFS_MAGIC:
        raise BadRequestError("a descriptor is no file in shared memory (memfd or tmpfs, no huge pages)")
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_ACCMODE != os.O_RDWR or flags & os.O_APPEND:
        raise BadRequestError("a descriptor is not open for reading and writing, or only for appending")
    # What is not there yet would come from this service's memory when it is written to.
    if not 0 < status.st_size <= status.st_blocks * 512:
        raise BadRequestError("a file is empty, or not all of its memory is there yet")
    return status.st_size
