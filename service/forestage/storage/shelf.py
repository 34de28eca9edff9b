"""The page files of one component: one file a shard, found by name, read straight into a slot. Blocking.

Law: a name stands for a whole page shard or for nothing. Files come into being under a temporary name and are renamed,
and no file that is there is ever written to; a reader holds a file only while it reads it and trusts no size but the
one it expects. What is opened, made or removed lies below the root: no link leads out of it.
"""

import contextlib
import errno
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from forestage.storage.base import Buffer, PageRead, ReadOutcome
from forestage.storage.beneath import FOLDER_FLAGS, make_beneath, open_beneath
from forestage.storage.envelope import TRAILER_BYTES, seal
from forestage.storage.leftovers import new_temporary_name

__all__ = [
    "CHUNK_BYTES",
    "READ_FLAGS",
    "Place",
    "Shelf",
    "place_of",
    "places_of",
    "read_in_chunks",
    "scan_beneath",
    "whole_pages",
]

CHUNK_BYTES = 8 << 20  # at most so much between two looks at `stopped`, two touches of `progress`

# Without O_NONBLOCK the open of a fifo would wait for its writer.
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW

_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})  # NFS says ESTALE of a deleted file
_ODD_ENTRY = frozenset({errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ESPIPE})  # link, socket, directory, fifo

_KEY = r"((?:[0-9a-f]{2}){16,64})([^0-9a-f].*)"
# The key comes first, or behind three words that each end in an at sign.
_NAMES = (re.compile("()" + _KEY, re.DOTALL), re.compile("((?:[^@]*@){3})" + _KEY, re.DOTALL))

#: (component index, shard)
Place = tuple[int, int]


@dataclass(frozen=True)
class Shelf:
    """Where the pages of one component lie and what a file of theirs looks like.

    A file is called `beginnings[shard]` (nothing without) + key + `endings[shard]`, in the folder that `folder` says.
    `directory` is `root` (nothing: the directory itself is the root) or below it.
    With `seeds` it ends in the trailer of the envelope, seeded with `seeds[shard]`; without, it is the payload alone.
    """

    directory: str
    fans_out: bool
    endings: tuple[str, ...]
    payload_bytes: int
    seeds: tuple[int, ...] = ()
    beginnings: tuple[str, ...] = ()
    root: str = ""

    @cached_property
    def marks(self) -> tuple[tuple[str, str], ...]:
        """What stands before and behind the key in the name of a file, one a shard."""
        return tuple(zip(self.beginnings or ("",) * len(self.endings), self.endings, strict=True))

    @cached_property
    def file_bytes(self) -> int:
        return self.payload_bytes + (TRAILER_BYTES if self.seeds else 0)

    @cached_property
    def page_bytes(self) -> int:
        """Payload of all shards."""
        return self.payload_bytes * len(self.endings)

    def folder(self, name: str) -> str:
        """Return the folder of a page, by its key in hex."""
        return f"{self.directory}/{name[:2]}" if self.fans_out else self.directory

    def folders(self) -> Iterator[str]:
        """Yield the folders in which pages can lie, whether or not they are there. Blocking."""
        if self.fans_out:
            yield from (f"{self.directory}/{fan:02x}" for fan in range(256))
        else:
            yield self.directory

    def paths(self, key: bytes) -> list[str]:
        """Return the paths of a page, one a shard."""
        name = key.hex()
        folder = self.folder(name)
        return [f"{folder}/{beginning}{name}{ending}" for beginning, ending in self.marks]

    @cached_property
    def top(self) -> str:
        """The directory that nothing leads out of."""
        return self.root or self.directory

    def new_spare(self) -> bytearray:
        """Return the buffer that takes what does not go into a slot: the trailer, and one byte to notice longer files.

        Every reading thread needs its own; any shelf of the same storage can use it.
        """
        return bytearray(TRAILER_BYTES + 1)

    def holds(self, key: bytes) -> bool:
        """Say whether all shards of a page are there, going by their names."""
        return all(os.access(path, os.F_OK) or _is_denied(path) for path in self.paths(key))

    def read(self, page: PageRead, spare: bytearray) -> ReadOutcome:
        """Read and verify all shards of a page."""
        paths = self.paths(page.key)
        for shard, view in enumerate(page.views):
            if shard and page.stopped:
                return ReadOutcome.STOPPED
            try:
                got = self._read_file(paths[shard], page, view, spare)
            except OSError as error:
                return _outcome_of(error)
            if got != self.file_bytes:
                return ReadOutcome.STOPPED if page.stopped and got < self.file_bytes else ReadOutcome.CORRUPT
            if self.seeds and not spare.startswith(seal(view, page.key, self.seeds[shard])):
                return ReadOutcome.CORRUPT
        return ReadOutcome.LOADED

    def write(self, key: bytes, shards: Sequence[Buffer], given_up: threading.Event) -> None:
        """Write all shards of a page under temporary names, then give them their names.

        After an OSError nothing of this page is new but, at worst, some whole shards. When `given_up` is set before
        they have their names, it ends so, at the next chunk.
        """
        names = [os.path.basename(path) for path in self.paths(key)]
        folder = make_beneath(self.top, self.folder(key.hex()))
        unnamed: list[str] = []
        try:
            for shard, payload in enumerate(shards):
                trailer = seal(payload, key, self.seeds[shard]) if self.seeds else b""
                temporary = new_temporary_name()
                descriptor = os.open(temporary, _WRITE_FLAGS, 0o666, dir_fd=folder)
                unnamed.append(temporary)
                try:
                    _write_all(descriptor, payload, given_up)
                    _write_all(descriptor, trailer, given_up)
                finally:
                    os.close(descriptor)
            _require_wanted(given_up)
            for name in names:
                os.rename(unnamed[0], name, src_dir_fd=folder, dst_dir_fd=folder)
                del unnamed[0]
        finally:
            for temporary in unnamed:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
            os.close(folder)

    def remove(self, key: bytes) -> bool:
        """Unlink all shards of a page; say whether there was one."""
        removed = False
        try:
            folder = open_beneath(self.top, self.folder(key.hex()), FOLDER_FLAGS)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            return False
        try:
            for path in self.paths(key):
                try:
                    os.unlink(os.path.basename(path), dir_fd=folder)
                    removed = True
                except OSError as error:
                    if error.errno not in _ABSENT:
                        raise
        finally:
            os.close(folder)
        return removed

    def open(self, path: str, flags: int) -> int:
        """Open one of `paths`; return its descriptor. Raises OSError, ELOOP for what lies behind a link."""
        # In the root itself there is only the name to be led astray by.
        return open_beneath(self.top, path, flags) if self.fans_out else os.open(path, flags)

    def _read_file(self, path: str, page: PageRead, view: memoryview, spare: bytearray) -> int:
        """Fill `view` and then `spare` from one file; return how many bytes that were, fewer if stopped on the way."""
        descriptor = self.open(path, READ_FLAGS)
        try:
            got = 0
            if self.payload_bytes <= CHUNK_BYTES:
                got = os.preadv(descriptor, (view, spare), 0)
            if got >= self.file_bytes:
                return got
            return read_in_chunks(descriptor, page, view, spare, got, self.file_bytes)
        finally:
            os.close(descriptor)


def read_in_chunks(descriptor: int, page: PageRead, head: memoryview, rest: Buffer, done: int, whole: int) -> int:
    """Read on from offset `done`, into `head` and then into `rest`, until the file ends or `whole` bytes are there.

    Returns how far it came: more than `whole` if the file is longer, less if it is shorter or the page was stopped.
    """
    straight = len(head)
    while done < whole:
        end = min(done + CHUNK_BYTES, straight)
        buffers = [head[done:end]] if done < end else []
        if end == straight:
            buffers.append(memoryview(rest)[max(0, done - straight) :])
        got = os.preadv(descriptor, buffers, done)
        if got == 0:
            break
        done += got
        page.progress += 1
        if page.stopped:
            break
    return done


def places_of(shelves: Sequence[Shelf]) -> dict[str, dict[tuple[str, str], Place]]:
    """Return, by folder, what the names of files there stand for: `Shelf.marks` to component index and shard."""
    places: dict[str, dict[tuple[str, str], Place]] = {}
    for index, shelf in enumerate(shelves):
        marks = {mark: (index, shard) for shard, mark in enumerate(shelf.marks)}
        for folder in shelf.folders():
            places.setdefault(folder, {}).update(marks)
    return places


def place_of(name: str, places: Mapping[tuple[str, str], Place]) -> tuple[Place, bytes] | None:
    """Take the name of a file apart; None for one that is no page's."""
    for form in _NAMES:
        named = form.fullmatch(name)
        place = places.get((named[1], named[3])) if named else None
        if named is not None and place is not None:
            return place, bytes.fromhex(named[2])
    return None


def whole_pages(shelves: Sequence[Shelf]) -> Iterator[tuple[int, bytes]]:
    """Yield (component index, key) of each page that has all its shards.

    Other names are passed over; a directory that is not there is empty. Raises OSError for one that cannot be read.
    """
    for folder, places in places_of(shelves).items():
        seen: dict[tuple[int, bytes], int] = {}
        with scan_beneath(shelves[0].top, folder) as entries:
            for entry in entries:
                found = place_of(entry.name, places)
                if found is None:
                    continue
                (component, shard), key = found
                shards = seen.pop((component, key), 0) | 1 << shard
                if shards == (1 << len(shelves[component].endings)) - 1:
                    yield component, key
                else:
                    seen[component, key] = shards


@contextlib.contextmanager
def scan_beneath(root: str, folder: str) -> Iterator[Iterable[os.DirEntry[str]]]:
    """Look at the names in a folder below the root; one that is not there, or a link, is empty. Raises OSError."""
    try:
        descriptor = open_beneath(root, folder, FOLDER_FLAGS)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        yield ()
        return
    try:
        with os.scandir(descriptor) as entries:
            yield entries
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, content: Buffer, given_up: threading.Event) -> None:
    left = memoryview(content)
    while len(left):
        _require_wanted(given_up)
        left = left[os.write(descriptor, left[:CHUNK_BYTES]) :]


def _require_wanted(given_up: threading.Event) -> None:
    if given_up.is_set():
        raise OSError(errno.ECANCELED, "the write was given up")


def _is_denied(path: str) -> bool:
    """Say whether looking failed for another reason than absence: the name may be there, the read will find out."""
    try:
        os.stat(path)
    except OSError as error:
        return error.errno not in _ABSENT
    return True


def _outcome_of(error: OSError) -> ReadOutcome:
    if error.errno in _ABSENT:
        return ReadOutcome.MISSING
    return ReadOutcome.CORRUPT if error.errno in _ODD_ENTRY else ReadOutcome.ERROR
