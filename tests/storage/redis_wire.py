"""A lane of the Redis storage on a socket pair: what a server might send, and what the lane makes of it."""

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from contract.storage_contract import keys, payload
from forestage.core.layout import Component, ModelLayout
from forestage.storage.base import PageRead, ReadOutcome
from forestage.storage.envelope import TRAILER_BYTES
from forestage.storage.redis.batch import Batch
from forestage.storage.redis.lane import Lane
from forestage.storage.redis.link import Link
from forestage.storage.redis.names import OwnNames
from forestage.storage.redis.node import Node
from support.resp import bulk

__all__ = ["LaneRun", "connected", "good_value", "model_of", "run_lane"]

GUARD = b"\xa5" * 32


def model_of(page_bytes: int) -> ModelLayout:
    """Return a model with one component."""
    return ModelLayout("acme/wire", 16, (Component("kv", page_bytes),))


def good_value(model: ModelLayout, key: bytes) -> bytes:
    """Return what is stored of a page."""
    (shard,) = OwnNames("test").of(model)[0]
    content = payload(model, 0, key, 0)
    return content + shard.seal(content, key)


@contextlib.contextmanager
def connected(patience_s: float = 10.0) -> Iterator[tuple[Link, socket.socket]]:
    """Yield a link and the server's end of it."""
    ours, theirs = socket.socketpair()
    link = Link(ours, patience_s, TRAILER_BYTES)
    try:
        yield link, theirs
    finally:
        link.close()
        theirs.close()


@dataclass(slots=True)
class LaneRun:
    """A lane that has ended, and what came of it."""

    lane: Lane
    outcomes: list[ReadOutcome]
    reads: list[PageRead]
    links: list[Link]
    asked: bytes = b""
    memory: bytearray = field(default_factory=bytearray)

    def check(self, model: ModelLayout) -> None:
        """Check that loaded pages are right and that nothing was written beside a page."""
        stride = model.components[0].bytes + len(GUARD)
        for at in range(0, len(self.memory), stride):
            assert self.memory[at : at + len(GUARD)] == GUARD
        for read, outcome in zip(self.reads, self.outcomes, strict=False):
            if outcome is ReadOutcome.LOADED:
                assert bytes(read.views[0]) == payload(model, 0, read.key, 0)


def run_lane(model: ModelLayout, count: int, *streams: Sequence[bytes], window_bytes: int = 1 << 20) -> LaneRun:
    """Read `count` pages; the n-th connection sends the pieces of the n-th stream and then ends."""
    size = model.components[0].bytes
    memory = bytearray((GUARD + bytes(size)) * count + GUARD)
    starts = [at * (size + len(GUARD)) + len(GUARD) for at in range(count)]
    reads = [
        PageRead(0, key, (memoryview(memory)[start : start + size],))
        for key, start in zip(keys(count), starts, strict=True)
    ]
    outcomes: list[ReadOutcome] = []
    batch = Batch(reads, lambda _, outcome: outcomes.append(outcome), OwnNames("test").of(model))
    left = list(streams)
    links: list[Link] = []
    threads: list[threading.Thread] = []

    def connect() -> Link:
        ours, theirs = socket.socketpair()
        thread = threading.Thread(target=_send, args=(theirs, left.pop(0)))
        threads.append(thread)
        thread.start()
        links.append(Link(ours, 10.0, TRAILER_BYTES))
        return links[-1]

    node = Node("wire", connect, 1)
    lane = Lane(node, batch.values, batch, window_bytes)
    lane.run()
    node.check_integrity()
    node.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    return LaneRun(lane, outcomes, reads, links, memory=memory)


def _send(sock: socket.socket, pieces: Sequence[bytes]) -> None:
    with sock, contextlib.suppress(OSError):
        for piece in pieces:
            sock.sendall(piece)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):  # what was asked must not reset the connection
            pass


def values(model: ModelLayout, count: int) -> list[bytes]:
    """Return the replies that carry the first `count` pages."""
    return [bulk(good_value(model, key)) for key in keys(count)]
