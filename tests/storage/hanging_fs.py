"""A file system whose reads and look-ups can be made to hang: files in memory, served over /dev/fuse.

Needs root. What hangs does so in the kernel, as on a dead network mount, and no signal or flag of ours ends it.
"""

import ctypes
import errno
import os
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Self

__all__ = ["HangingFs"]

_LOOKUP, _GETATTR, _OPEN, _READ, _RELEASE, _FLUSH, _INIT, _OPENDIR, _RELEASEDIR = 1, 3, 14, 15, 18, 25, 26, 27, 29
_FORGET, _BATCH_FORGET, _INTERRUPT = 2, 42, 36
_IN_HEADER = struct.Struct("<IIQQIIII")
_OUT_HEADER = struct.Struct("<IiQ")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_FOPEN_DIRECT_IO = 1
_PARALLEL_DIROPS = 1 << 18  # without it one look-up that hangs locks its directory
_MNT_DETACH = 2


def _libc_call(name: str, *args: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        raise OSError(ctypes.get_errno(), name)


class HangingFs:
    """Mounts `files` flat at `mount`; names in `hung_reads` or `hung_lookups` get no answer before `release`."""

    def __init__(self, mount: Path, files: Mapping[str, bytes]) -> None:
        self.mount = mount
        self.names = list(files)
        self.contents = list(files.values())
        self.hung_reads: set[str] = set()
        self.hung_lookups: set[str] = set()
        self.waiting: list[str] = []
        self._held: list[tuple[int, bytes]] = []
        self._lock = threading.Lock()
        self._device = os.open("/dev/fuse", os.O_RDWR)
        self._server = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0".encode()
        _libc_call("mount", b"test", bytes(self.mount), b"fuse", 6, options)
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        _libc_call("umount2", bytes(self.mount), _MNT_DETACH)
        self._server.join(10)
        os.close(self._device)

    def release(self) -> None:
        """Answer everything that hangs, and let nothing hang from now on."""
        with self._lock:
            self.hung_reads.clear()
            self.hung_lookups.clear()
            for unique, body in self._held:
                self._reply(unique, body)
            self._held.clear()

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, 1 << 20)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                continue
            _, opcode, unique, node, *_ = _IN_HEADER.unpack_from(request)
            with self._lock:
                self._answer(opcode, unique, node, request[_IN_HEADER.size :])

    def _answer(self, opcode: int, unique: int, node: int, body: bytes) -> None:
        match opcode:
            case _ if opcode in {_FORGET, _BATCH_FORGET, _INTERRUPT}:
                return
            case _ if opcode == _INIT:
                self._reply(
                    unique,
                    struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 17, _PARALLEL_DIROPS, 16, 12, 1 << 17, 1, 32, 0, 0),
                )
            case _ if opcode == _LOOKUP:
                name = body.rstrip(b"\0").decode()
                if name in self.names:
                    inode = self.names.index(name) + 2
                    entry = struct.pack("<QQQQII", inode, 0, 0, 0, 0, 0) + self._attr(inode)
                    self._reply_or_hold(unique, entry, name, self.hung_lookups)
                else:
                    self._reply(unique, error=errno.ENOENT)
            case _ if opcode == _GETATTR:
                self._reply(unique, struct.pack("<QII", 0, 0, 0) + self._attr(node))
            case _ if opcode in {_OPEN, _OPENDIR}:
                self._reply(unique, struct.pack("<QII", 0, _FOPEN_DIRECT_IO if opcode == _OPEN else 0, 0))
            case _ if opcode == _READ:
                _, offset, size = struct.unpack_from("<QQI", body)
                content = self.contents[node - 2][offset : offset + size]
                self._reply_or_hold(unique, content, self.names[node - 2], self.hung_reads)
            case _ if opcode in {_RELEASE, _RELEASEDIR, _FLUSH}:
                self._reply(unique)
            case _:
                self._reply(unique, error=errno.ENOSYS)

    def _attr(self, inode: int) -> bytes:
        size = 0 if inode == 1 else len(self.contents[inode - 2])
        mode = 0o40755 if inode == 1 else 0o100644
        return _ATTR.pack(inode, size, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def _reply_or_hold(self, unique: int, body: bytes, name: str, hung: set[str]) -> None:
        if name in hung:
            self.waiting.append(name)
            self._held.append((unique, body))
        else:
            self._reply(unique, body)

    def _reply(self, unique: int, body: bytes = b"", error: int = 0) -> None:
        try:
            os.write(self._device, _OUT_HEADER.pack(_OUT_HEADER.size + len(body), -error, unique) + body)
        except OSError as failure:
            if failure.errno != errno.ENOENT:  # the request was interrupted
                raise
