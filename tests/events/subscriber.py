"""A subscriber to KV events over real sockets, which decodes them by the rules of their readers and keeps a table."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
import zmq
import zmq.asyncio

__all__ = ["Message", "Table", "ask_again", "subscribed"]

_WAIT_S = 20.0
_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
_REMOVED = ("block_hashes", "medium")


class Message(NamedTuple):
    """One batch. Events are maps, whichever form they came in."""

    number: int
    topic: bytes
    timestamp: float
    rank: int
    events: list[dict[str, Any]]


def _decode(topic: bytes, number: bytes, payload: bytes) -> Message:
    timestamp, events, rank = msgpack.unpackb(payload)
    assert len(number) == 8
    return Message(int.from_bytes(number, "big"), topic, timestamp, rank, [_as_map(event) for event in events])


def _as_map(event: Any) -> dict[str, Any]:
    if isinstance(event, dict):
        wanted = {"BlockStored": _STORED, "BlockRemoved": _REMOVED, "AllBlocksCleared": ()}[event["type"]]
        assert set(event) - {"group_idx"} == {"type", *wanted}
        return event
    name, *values = event
    names = {"BlockStored": _STORED, "BlockRemoved": _REMOVED, "AllBlocksCleared": ()}[name]
    return {"type": name, **dict(zip(names, values, strict=True))}


@dataclass
class Table:
    """What a reader believes to be there, by group (None in the array form), and which numbers it has seen."""

    blocks: dict[int | None, set[Any]] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    topics: set[bytes] = field(default_factory=set)

    def take(self, message: Message) -> None:
        self.numbers.append(message.number)
        self.topics.add(message.topic)
        for event in message.events:
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
                continue
            assert event["medium"] == "CPU"
            known, told = self.blocks.setdefault(event.get("group_idx"), set()), event["block_hashes"]
            assert len(set(told)) == len(told)
            if event["type"] == "BlockStored":
                assert not known.intersection(told)
                known.update(told)
            else:
                assert known.issuperset(told)
                known.difference_update(told)


class Subscriber:
    """A SUB socket."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self.table = Table()

    async def receive(self) -> Message:
        """Wait for one message; the table does not learn of it."""
        async with asyncio.timeout(_WAIT_S):
            topic, number, payload = await self._socket.recv_multipart()
        return _decode(topic, number, payload)

    async def next(self) -> Message:
        """Wait for one message, and take it in."""
        message = await self.receive()
        self.table.take(message)
        return message

    async def until(self, blocks: set[Any], group: int | None = None) -> None:
        """Take messages in until these are the blocks of a group."""
        while self.table.blocks.get(group, set()) != blocks:
            await self.next()


@contextmanager
def subscribed(endpoint: str, topic: bytes = b"", hwm: int = 1000, buffer: int = 0) -> Iterator[Subscriber]:
    """Subscribe; `hwm` messages and `buffer` bytes (0: as the system likes) may wait on this side."""
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, hwm)
        if buffer:
            socket.setsockopt(zmq.RCVBUF, buffer)
        socket.subscribe(topic)
        socket.connect(endpoint)
        yield Subscriber(socket)


async def ask_again(endpoint: str, number: int) -> list[Message]:
    """Ask for what is kept from `number` on, as vLLM's and SGLang's readers do."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        await socket.send_multipart([b"", number.to_bytes(8, "big")])
        messages: list[Message] = []
        while True:
            async with asyncio.timeout(_WAIT_S):
                empty, topic, position, payload = await socket.recv_multipart()
            assert empty == b""
            if position == b"\xff" * 8:
                assert (topic, payload) == (b"", b"")
                return messages
            messages.append(_decode(topic, position, payload))
