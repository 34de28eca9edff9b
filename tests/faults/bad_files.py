"""Files that are no good pages, each as something that turns a good one bad; `reasons` are by storage kind."""

import os
import pickle
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BAD_FILES", "BadFile"]


@dataclass(frozen=True)
class BadFile:
    """`spoil(path)` makes the file bad; a kind that is not in `reasons` cannot tell it from a good one."""

    name: str
    spoil: Callable[[Path], object]
    reasons: Mapping[str, str]


def _both(reason: str) -> dict[str, str]:
    return {"file": reason, "hicache-file": reason}


def _patch(at: int, content: bytes) -> Callable[[Path], object]:
    """Overwrite bytes at an offset from the start, or before the end."""

    def spoil(path: Path) -> None:
        whole = bytearray(path.read_bytes())
        start = at % len(whole)
        whole[start : start + len(content)] = content
        path.write_bytes(whole)

    return spoil


def _resize(change: Callable[[int], int]) -> Callable[[Path], object]:
    return lambda path: os.truncate(path, change(path.stat().st_size))


def _replace(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def spoil(path: Path) -> None:
        path.unlink()
        make(path)

    return spoil


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        # the name of a page is too long for a socket's address
        short = path.parent / "s"
        sock.bind(str(short))
        short.rename(path)


def _zeros(path: Path) -> None:
    size = path.stat().st_size
    path.write_bytes(b"")
    os.truncate(path, size)


def _link_to_a_copy(path: Path) -> None:
    path.rename(path.with_name("whole"))
    path.symlink_to("whole")


def _other_page(path: Path) -> None:
    """Put a whole value of another page under this name."""
    size = path.stat().st_size
    like_it = (one for one in path.parents[1].rglob(f"*{path.suffix}") if one.is_file() and one.stat().st_size == size)
    path.write_bytes(next(one for one in like_it if one != path).read_bytes())


_TRAILER = 96

BAD_FILES = [
    BadFile("empty", _resize(lambda size: 0), _both("corrupt")),
    BadFile("of one byte", _resize(lambda size: 1), _both("corrupt")),
    BadFile("one byte short", _resize(lambda size: size - 1), _both("corrupt")),
    BadFile("one byte long", _resize(lambda size: size + 1), _both("corrupt")),
    BadFile("twice as long", _resize(lambda size: 2 * size), _both("corrupt")),
    BadFile("of 64 MiB", _resize(lambda size: 64 << 20), _both("corrupt")),
    BadFile("without its trailer", _resize(lambda size: size - _TRAILER), _both("corrupt")),
    BadFile("with one bit changed", _patch(100, b"\xff"), {"file": "corrupt"}),
    BadFile("of zeros", _zeros, {"file": "corrupt"}),
    BadFile("another page's, whole", _other_page, {"file": "corrupt"}),
    BadFile("of an unknown version", _patch(-_TRAILER + 8, b"\x63\0\0\0"), {"file": "corrupt"}),
    BadFile("with a length field of 4 GiB", _patch(-_TRAILER + 16, b"\0\0\0\0\1\0\0\0"), {"file": "corrupt"}),
    BadFile("another program's", lambda path: path.write_bytes(pickle.dumps({"kv": [1] * 5000})), _both("corrupt")),
    BadFile("a directory", _replace(lambda path: path.mkdir()), _both("corrupt")),
    BadFile("a fifo", _replace(os.mkfifo), _both("corrupt")),
    BadFile("a socket", _replace(_socket), _both("corrupt")),
    BadFile("a symbolic link", _link_to_a_copy, _both("corrupt")),
    BadFile("a dangling symbolic link", _replace(lambda path: path.symlink_to("nowhere")), _both("not_stored")),
    BadFile("gone before it was looked for", lambda path: path.unlink(), _both("not_stored")),
]
