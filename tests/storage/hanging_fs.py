"""A file system whose reads, writes and look-ups can be made to hang: files in memory, served over /dev/fuse.

Needs root. What hangs does so in the kernel, as on a dead network mount, and no signal or flag of ours ends it. The
server is a process of its own, so that a test process that is killed meanwhile does not wait for itself for ever.
"""

import base64
import ctypes
import errno
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

__all__ = ["HangingFs"]

_LOOKUP, _GETATTR, _OPEN, _READ, _RELEASE, _FLUSH, _INIT, _OPENDIR, _RELEASEDIR = 1, 3, 14, 15, 18, 25, 26, 27, 29
_UNLINK, _RENAME, _WRITE, _CREATE = 10, 12, 16, 35
_FORGET, _BATCH_FORGET, _INTERRUPT = 2, 42, 36
_IN_HEADER = struct.Struct("<IIQQIIII")
_OUT_HEADER = struct.Struct("<IiQ")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_FOPEN_DIRECT_IO = 1
_PARALLEL_DIROPS = 1 << 18  # without it one look-up that hangs locks its directory
_MNT_DETACH = 2
_DONE = "/"  # no name of a file


def _libc_call(name: str, *args: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        raise OSError(ctypes.get_errno(), name)


class HangingFs:
    """Mounts `files` flat at `mount`, in a context; everything answers until `hang` names what shall not."""

    def __init__(self, mount: Path, files: Mapping[str, bytes]) -> None:
        self.mount = mount
        #: Names whose answers are withheld, in the order in which somebody began to wait for them.
        self.waiting: list[str] = []
        self._done = threading.Semaphore(0)
        self._files = {name: base64.b64encode(content).decode() for name, content in files.items()}

    def __enter__(self) -> Self:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        self._server = subprocess.Popen(
            [sys.executable, "-u", __file__, self.mount],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._say(self._files)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()  # it answers everything and ends
        self._server.wait(10)
        self._listener.join(10)
        self._server.stdout.close()

    def hang(self, *, reads: Iterable[str] = (), lookups: Iterable[str] = (), writes: bool = False) -> None:
        """Answer no read or look-up of these names, from now on and in addition to those before; or no write at all."""
        self._say({"reads": list(reads), "lookups": list(lookups), "writes": writes})

    def release(self) -> None:
        """Answer everything that hangs, and let nothing hang from now on."""
        self._say("release")

    def _say(self, command: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(command) + "\n")
        self._server.stdin.flush()
        assert self._done.acquire(timeout=10)

    def _listen(self) -> None:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            if line == _DONE + "\n":
                self._done.release()
            else:
                self.waiting.append(line.rstrip("\n"))


class _Server:
    def __init__(self, mount: str, files: Mapping[str, bytes]) -> None:
        self.names = list(files)
        self.contents = list(files.values())
        self.hung: dict[int, set[str]] = {_READ: set(), _LOOKUP: set()}
        self.hangs_writes = False
        self.lock = threading.Lock()
        self._held: list[tuple[int, bytes]] = []
        self._device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0".encode()
        _libc_call("mount", b"test", os.fsencode(mount), b"fuse", 6, options)

    def release(self) -> None:
        with self.lock:
            self.hangs_writes = False
            for names in self.hung.values():
                names.clear()
            for unique, body in self._held:
                self._reply(unique, body)
            self._held.clear()

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, 1 << 20)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                continue
            _, opcode, unique, node, *_ = _IN_HEADER.unpack_from(request)
            with self.lock:
                self._answer(opcode, unique, node, request[_IN_HEADER.size :])

    def _answer(self, opcode: int, unique: int, node: int, body: bytes) -> None:
        if opcode in {_FORGET, _BATCH_FORGET, _INTERRUPT}:
            return
        if opcode == _INIT:
            version = (7, 31, 1 << 17, _PARALLEL_DIROPS, 16, 12, 1 << 17, 1, 32, 0, 0)
            self._reply(unique, struct.pack("<IIIIHHIIHHI28x", *version))
        elif opcode == _LOOKUP:
            name = body.rstrip(b"\0").decode()
            if name in self.names:
                inode = self.names.index(name) + 2
                self._reply_or_hold(unique, self._entry(inode), name, opcode)
            else:
                self._reply(unique, error=errno.ENOENT)
        elif opcode == _GETATTR:
            self._reply(unique, struct.pack("<QII", 0, 0, 0) + self._attr(node))
        elif opcode in {_OPEN, _OPENDIR}:
            self._reply(unique, struct.pack("<QII", 0, _FOPEN_DIRECT_IO if opcode == _OPEN else 0, 0))
        elif opcode == _READ:
            _, offset, size = struct.unpack_from("<QQI", body)
            content = self.contents[node - 2][offset : offset + size]
            self._reply_or_hold(unique, content, self.names[node - 2], opcode)
        elif opcode == _CREATE:
            self.names.append(body[16:].rstrip(b"\0").decode())
            self.contents.append(b"")
            opened = struct.pack("<QII", 0, _FOPEN_DIRECT_IO, 0)
            self._reply(unique, self._entry(len(self.names) + 1) + opened)
        elif opcode == _WRITE:
            _, offset, size = struct.unpack_from("<QQI", body)
            content = self.contents[node - 2]
            self.contents[node - 2] = content[:offset] + body[40 : 40 + size] + content[offset + size :]
            self._reply_or_hold(unique, struct.pack("<II", size, 0), self.names[node - 2], opcode)
        elif opcode == _RENAME:
            before, after = body[8:].rstrip(b"\0").decode().split("\0")
            self._unname(after)
            self.names[self.names.index(before)] = after
            self._reply(unique)
        elif opcode == _UNLINK:
            self._unname(body.rstrip(b"\0").decode())
            self._reply(unique)
        elif opcode in {_RELEASE, _RELEASEDIR, _FLUSH}:
            self._reply(unique)
        else:
            self._reply(unique, error=errno.ENOSYS)

    def _unname(self, name: str) -> None:
        if name in self.names:
            self.names[self.names.index(name)] = _DONE

    def _entry(self, inode: int) -> bytes:
        return struct.pack("<QQQQII", inode, 0, 0, 0, 0, 0) + self._attr(inode)

    def _attr(self, inode: int) -> bytes:
        size = 0 if inode == 1 else len(self.contents[inode - 2])
        mode = 0o40755 if inode == 1 else 0o100644
        return _ATTR.pack(inode, size, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def _reply_or_hold(self, unique: int, body: bytes, name: str, opcode: int) -> None:
        if self.hangs_writes if opcode == _WRITE else name in self.hung[opcode]:
            self._held.append((unique, body))
            print(name)
        else:
            self._reply(unique, body)

    def _reply(self, unique: int, body: bytes = b"", error: int = 0) -> None:
        try:
            os.write(self._device, _OUT_HEADER.pack(_OUT_HEADER.size + len(body), -error, unique) + body)
        except OSError as failure:
            if failure.errno != errno.ENOENT:  # the request was interrupted
                raise


def _main(mount: str) -> None:
    files = {name: base64.b64decode(content) for name, content in json.loads(sys.stdin.readline()).items()}
    server = _Server(mount, files)
    threading.Thread(target=server.serve, daemon=True).start()
    print(_DONE)
    try:
        for line in sys.stdin:
            command = json.loads(line)
            if command == "release":
                server.release()
            else:
                with server.lock:
                    server.hung[_READ].update(command["reads"])
                    server.hung[_LOOKUP].update(command["lookups"])
                    server.hangs_writes = server.hangs_writes or command["writes"]
            print(_DONE)
    finally:
        server.release()
        _libc_call("umount2", os.fsencode(mount), _MNT_DETACH)


if __name__ == "__main__":
    _main(sys.argv[1])
