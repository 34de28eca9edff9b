"""Lines in order while they are read; while they are not, nobody waits, and what was lost is said."""

import logging
import os
import threading
import time
from collections.abc import Iterator

import pytest

from forestage.observe.log_writer import LogWriter


class _Pipe:
    def __init__(self) -> None:
        self.reads, self.writes = os.pipe()
        self.writer = LogWriter(self.writes, max_lines=100)
        self.log = logging.Logger("test")
        self.log.addHandler(self.writer)

    def read(self, last: str) -> list[str]:
        """Read until a line that begins with `last` came."""
        said = b""
        while not any(line.startswith(last) for line in said.decode().splitlines()) or not said.endswith(b"\n"):
            said += os.read(self.reads, 1 << 16)
        return said.decode().splitlines()


@pytest.fixture
def pipe() -> Iterator[_Pipe]:
    made = _Pipe()
    yield made
    drain = threading.Thread(target=lambda: [None for _ in iter(lambda: os.read(made.reads, 1 << 16), b"")])
    drain.start()
    made.writer.close()
    made.writer._thread.join(10)
    assert not made.writer._thread.is_alive()
    os.close(made.writes)
    drain.join(10)
    os.close(made.reads)


def test_lines_come_whole_and_in_order(pipe: _Pipe) -> None:
    for i in range(50):
        pipe.log.info("line %d", i)
    assert pipe.read("line 49") == [f"line {i}" for i in range(50)]


def test_flush_waits_for_what_is_read(pipe: _Pipe) -> None:
    pipe.log.info("first")
    pipe.log.info("last")
    pipe.writer.flush()
    assert os.read(pipe.reads, 100) == b"first\nlast\n"


def test_a_reader_that_is_stuck_costs_lines_but_no_time(pipe: _Pipe) -> None:
    began = time.monotonic()
    long = "x" * 4096
    for i in range(1000):  # 4 MB into a pipe of 64 KiB
        pipe.log.info("%d %s", i, long)
    assert time.monotonic() - began < 5
    began = time.monotonic()
    pipe.writer.flush()
    assert 0.5 < time.monotonic() - began < 5  # bounded
    lines: list[str] = []
    dropped = 0
    while not dropped:
        pipe.log.info("and on")  # there is room again soon, and then it is said
        lines += pipe.read("")
        dropped = sum("dropped" in line for line in lines)
    numbers = [int(line.split()[0]) for line in lines if line.endswith("x")]
    assert numbers == sorted(set(numbers))
    assert len(numbers) < 1000


def test_nobody_there_is_no_error() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    writer = LogWriter(writes)
    log = logging.Logger("test")
    log.addHandler(writer)
    for i in range(10):
        log.info("line %d", i)
        writer.flush()
    writer.close()
    writer._thread.join(10)
    assert not writer._thread.is_alive()
    os.close(writes)


def test_a_descriptor_that_does_not_block_gets_everything() -> None:
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    writer = LogWriter(writes)
    log = logging.Logger("test")
    log.addHandler(writer)
    for i in range(200):
        log.info("%04d %s", i, "x" * 1000)
    said = b""
    while said.count(b"\n") < 200:
        said += os.read(reads, 1 << 16)
    writer.close()
    writer._thread.join(10)
    assert [int(line[:4]) for line in said.splitlines()] == list(range(200))
    os.close(reads)
    os.close(writes)
