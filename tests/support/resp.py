"""The bytes of RESP2: replies as a server writes them, commands as it reads them."""

from collections.abc import Sequence
from typing import BinaryIO

__all__ = ["array", "bulk", "error", "number", "read_command"]


def error(text: str) -> bytes:
    """Return an error reply."""
    return f"-{text}\r\n".encode()


def bulk(value: bytes | None) -> bytes:
    """Return a value as a reply, None for one that is not there."""
    return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)


def number(value: int) -> bytes:
    """Return a number as a reply."""
    return b":%d\r\n" % value


def array(replies: Sequence[bytes]) -> bytes:
    """Return replies as one."""
    return b"*%d\r\n" % len(replies) + b"".join(replies)


def read_command(stream: BinaryIO) -> tuple[bytes, ...]:
    """Read one command, as an array of bulk strings or as a line; empty at the end of the stream."""
    line = stream.readline()
    if not line.startswith(b"*"):
        return tuple(line.split())
    words = []
    for _ in range(int(line[1:])):
        size = int(stream.readline()[1:])
        words.append(stream.read(size + 2)[:-2])
    return tuple(words)
