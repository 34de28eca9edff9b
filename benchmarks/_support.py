"""What the benchmarks over Redis share: a server of their own, pages in it, the raw drain, medians and tables."""

import argparse
import asyncio
import hashlib
import json
import mmap
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from forestage.core.layout import Component, ModelLayout
from forestage.storage.base import PageRead, ReadOutcome
from forestage.storage.envelope import TRAILER_BYTES
from forestage.storage.redis import RedisStorage
from support.redis_servers import RedisServer, standalone

__all__ = [
    "PREFIX",
    "Drain",
    "Sample",
    "add_options",
    "connect",
    "fill",
    "make_keys",
    "make_model",
    "memory",
    "print_progress",
    "print_table",
    "redis_at",
    "run_async",
    "stored_names",
    "through_storage",
    "timed",
    "value_bytes",
    "write_json",
]

T = TypeVar("T")
PREFIX = "bench"


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition: seconds on the clock, and CPU seconds of this process with all its threads."""

    seconds: float
    cpu_s: float


# ---- options and output


def add_options(parser: argparse.ArgumentParser, *, repeat: int = 7) -> None:
    """Add the options that all of them have."""
    parser.add_argument("--repeat", type=int, default=repeat, help="repetitions, interleaved; medians are shown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")


def print_table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print rows with the names of their columns above; a list of numbers is shown as its median and its spread."""
    print(title)
    cells = [[_shown(value) for value in row.values()] for row in rows]
    names = list(rows[0])
    widths = [max(len(name), *(len(line[at]) for line in cells)) for at, name in enumerate(names)]
    print("  ".join(name.rjust(width) for name, width in zip(names, widths, strict=True)))
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print()


def print_progress(row: dict[str, Any]) -> None:
    """Print a row of the table to come on stderr."""
    print("; ".join(f"{name} {_shown(value)}" for name, value in row.items()), file=sys.stderr, flush=True)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"{statistics.median(value):.2f} ({min(value):.2f}-{max(value):.2f})"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def write_json(path: Path | None, name: str, rows: Sequence[dict[str, Any]], **settings: Any) -> None:
    """Write figures and what they were measured with, if a file was asked for."""
    if path is None:
        return
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "kernel": platform.release()}
    path.write_text(json.dumps({"benchmark": name, "settings": settings, "machine": machine, "rows": rows}, indent=1))


# ---- pages


def make_keys(count: int, chain: int = 0) -> list[bytes]:
    """Return page keys."""
    return [hashlib.sha256(f"{chain}|{page}".encode()).digest() for page in range(count)]


def make_model(page_bytes: int, name: str = "bench") -> ModelLayout:
    """Return a model with one component."""
    return ModelLayout(name, 64, (Component("kv", page_bytes),))


def memory(total: int) -> memoryview:
    """Return memory of our own that was touched before."""
    view = memoryview(mmap.mmap(-1, total))
    for at in range(0, total, 4096):
        view[at] = 1
    return view


def stored_names(model: ModelLayout, keys: Sequence[bytes]) -> list[bytes]:
    """Return the keys that pages have in Redis."""
    return [f"{PREFIX}:{model.fingerprint}:kv:0:".encode() + key for key in keys]


async def fill(server: RedisServer, model: ModelLayout, keys: Sequence[bytes]) -> None:
    """Put pages with random content into Redis."""
    storage = RedisStorage(server.url, prefix=PREFIX)
    await storage.open()
    size = model.components[0].bytes
    block = os.urandom(size)
    for at in range(0, len(keys), 16):
        part = keys[at : at + 16]
        await asyncio.gather(*(storage.write(model, 0, key, [key + block[len(key) :]]) for key in part))
    await storage.aclose()


# ---- Redis


@contextmanager
def redis_at(*, unix: bool) -> Iterator[RedisServer]:
    """Run a server for one measurement."""
    with (
        tempfile.TemporaryDirectory(prefix="forestage-bench-") as folder,
        standalone(Path(folder), unix=unix) as server,
    ):
        yield server


def connect(server: RedisServer) -> socket.socket:
    """Return a blocking socket to a server."""
    if server.socket_path:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(server.socket_path)
    else:
        sock = socket.create_connection(("127.0.0.1", server.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class Drain:
    """The floor: pipelined GETs over one blocking socket, every reply received into the same scratch buffer."""

    def __init__(self, server: RedisServer, names: Sequence[bytes], value_bytes: int, window: int) -> None:
        """Connect.

        Args:
            server: which has all the values.
            names: their keys, in the order in which they are read.
            value_bytes: the size of each.
            window: so many bytes of replies may be due at once; asked for again when half of them have come.
        """
        self._sock = connect(server)
        self._reply_bytes = len(b"$%d\r\n" % value_bytes) + value_bytes + 2
        self._commands = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name) for name in names]
        self._window = max(1, window // self._reply_bytes)
        self._scratch = memory(1 << 20)
        self._sent = 0

    def run(self) -> None:
        """Drain all once."""
        sock, scratch, reply_bytes = self._sock, self._scratch, self._reply_bytes
        total = len(self._commands) * reply_bytes
        received = self._sent = 0
        while received < total:
            sent = self._ask(received // reply_bytes)
            received += sock.recv_into(scratch, min(len(scratch), sent * reply_bytes - received))

    def _ask(self, received: int) -> int:
        """Ask for more if it is time, and return how many were asked for; `received` replies have come."""
        due = self._sent - received
        if self._sent < len(self._commands) and due <= self._window // 2:
            until = min(len(self._commands), self._sent + self._window - due)
            self._sock.sendall(b"".join(self._commands[self._sent : until]))
            self._sent = until
        return self._sent

    def close(self) -> None:
        self._sock.close()


def timed(work: Callable[[], object]) -> Sample:
    """Measure a call."""
    cpu, begin = time.process_time(), time.perf_counter()
    work()
    return Sample(time.perf_counter() - begin, time.process_time() - cpu)


async def through_storage(
    storage: RedisStorage, model: ModelLayout, keys: Sequence[bytes], views: Sequence[memoryview]
) -> None:
    """Read pages through the storage as the service does: its batch size, its batches in flight."""
    per_batch = max(1, storage.batch_bytes // model.components[0].bytes)
    reads = [PageRead(0, key, (view,)) for key, view in zip(keys, views, strict=True)]
    batches = [reads[first : first + per_batch] for first in range(0, len(reads), per_batch)][::-1]
    outcomes: list[ReadOutcome] = []

    def report(index: int, outcome: ReadOutcome) -> None:
        outcomes.append(outcome)

    async def feed() -> None:
        while batches:
            await storage.read_into(model, batches.pop(), report)

    await asyncio.gather(*(feed() for _ in range(storage.batches_in_flight)))
    if outcomes != [ReadOutcome.LOADED] * len(keys):
        raise RuntimeError("not every page was read")


def value_bytes(model: ModelLayout) -> int:
    """Return the stored size of a page."""
    return model.components[0].bytes + TRAILER_BYTES


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run on the loop, and with the switch interval, that the service uses."""
    sys.setswitchinterval(0.0005)
    try:
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    except ImportError:
        factory = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)
