"""Reading page files past the page cache, with O_DIRECT, where the file system and the alignment allow it.

Law: what the kernel is given is aligned in memory, offset and length: the whole blocks of a payload go straight into
the slot, the rest of the file by way of a scratch buffer of whole blocks.
"""

import errno
import mmap
import os

from forestage.storage.base import PageRead
from forestage.storage.shelf import READ_FLAGS, Shelf, read_in_chunks

__all__ = ["DirectShelf"]

_BLOCK_BYTES = 4096  # the largest block size in use


class _Spare(bytearray):
    """A spare buffer with an aligned scratch buffer behind it."""

    __slots__ = ("scratch",)

    def __init__(self, content: bytearray) -> None:
        super().__init__(content)
        self.scratch = memoryview(mmap.mmap(-1, 2 * _BLOCK_BYTES))


class DirectShelf(Shelf):
    """A shelf that reads around the page cache; a file that refuses is read as any other."""

    def new_spare(self) -> bytearray:
        return _Spare(super().new_spare())

    def _read_file(self, path: str, page: PageRead, view: memoryview, spare: bytearray) -> int:
        if not isinstance(spare, _Spare):
            raise TypeError("this shelf reads with a spare buffer of its own kind")
        straight = self.payload_bytes - self.payload_bytes % _BLOCK_BYTES
        try:
            descriptor = self.open(path, READ_FLAGS | os.O_DIRECT)
            try:
                got = read_in_chunks(descriptor, page, view[:straight], spare.scratch, 0, self.file_bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            # A file system without it, a slot that is not aligned, or a file that ends within a block.
            if error.errno != errno.EINVAL:
                raise
            return super()._read_file(path, page, view, spare)
        rest = self.payload_bytes - straight
        view[straight:] = spare.scratch[:rest]
        spare[:] = spare.scratch[rest : rest + len(spare)]
        return got
