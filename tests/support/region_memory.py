"""Memory files of a test, and their registration with a service, by its bytes on the wire."""

import json
import mmap
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["Memory", "memory_of", "register", "send_memory"]


class Memory:
    """Memory files of this process: filled with 0xEE, mapped, one behind another."""

    def __init__(self, *sizes: int) -> None:
        self.fds = [os.memfd_create("slots", os.MFD_CLOEXEC) for _ in sizes]
        for fd, size in zip(self.fds, sizes, strict=True):
            os.write(fd, b"\xee" * size)
        self.maps = [mmap.mmap(fd, 0) for fd in self.fds]

    def bytes(self) -> bytes:
        return b"".join(mapping[:] for mapping in self.maps)

    def close(self) -> None:
        for fd, mapping in zip(self.fds, self.maps, strict=True):
            os.close(fd)
            mapping.close()


@contextmanager
def memory_of(*sizes: int) -> Iterator[Memory]:
    memory = Memory(*sizes)
    try:
        yield memory
    finally:
        memory.close()


def send_memory(path: str, header: Any, fds: Sequence[int]) -> tuple[socket.socket, dict[str, Any]]:
    """Send a header and descriptors; return the connection and what was answered."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    sock.connect(path)
    socket.send_fds(sock, [len(data).to_bytes(4, "little") + data], fds)
    size = int.from_bytes(sock.recv(4), "little")
    answer: dict[str, Any] = json.loads(sock.recv(size))
    return sock, answer


def register(path: str, memory: Memory) -> tuple[socket.socket, str]:
    """Register memory; return the connection that keeps the region, and its id."""
    sock, answer = send_memory(path, {"version": 1, "files": len(memory.fds)}, memory.fds)
    assert answer["bytes"] == sum(len(mapping) for mapping in memory.maps)
    return sock, answer["region"]
