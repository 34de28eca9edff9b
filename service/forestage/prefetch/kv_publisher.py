"""Publishes what comes into the pool and leaves it as KV events over ZeroMQ, and again for those who missed some.

Law: every batch has the next number, is published once, and can be asked for while it is among the last that are kept.
The publisher follows the pool, whatever subscribers do: it is they who lose batches.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from itertools import groupby

from forestage.core.batch_log import Batch, BatchLog
from forestage.core.kv_events import BlockChange, Blocks, HashForm, KvForm, encode_batch, write_event
from forestage.core.layout import ModelLayout
from forestage.core.residency import ResidencyEvent
from forestage.prefetch.feed import Channel, ResidencyFeed, Snapshot
from forestage.prefetch.zmq_sockets import PeerGoneError, ZmqSockets

__all__ = ["KvPublisher", "PublisherSettings"]

log = logging.getLogger("forestage.events")

_BLOCKS_AT_ONCE = 512
_IDLE_S = 3600.0
_REPLAYS_AT_ONCE = 4
_REPLAY_STEP = 32  # batches between two looks at what else there is to do
_PEER_PATIENCE_S = 5.0  # with one that takes nothing of what it asked for
_FULL_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    """What is published where. `hash_forms` are by model; `{model}` in `topic` stands for the model's name.

    With `clear`, the first batch says that all blocks are cleared. Without `replay_endpoint` there are no replays.
    """

    endpoint: str
    replay_endpoint: str
    topic: str
    form: KvForm
    hash_forms: Mapping[str, HashForm]
    buffer_steps: int
    data_parallel_rank: int = 0
    clear: bool = True


class KvPublisher:
    """`open` it, then let `run` run in a task; both sockets are closed when that ends."""

    def __init__(
        self,
        feed: ResidencyFeed,
        layouts: Iterable[ModelLayout],
        settings: PublisherSettings,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Bind nothing yet; `clock` gives seconds since 1970."""
        self._feed = feed
        self._settings = settings
        self._clock = clock
        self._blocks = {
            layout.name: Blocks(layout, settings.form, settings.hash_forms[layout.name]) for layout in layouts
        }
        self._topics = {name: settings.topic.replace("{model}", name).encode() for name in self._blocks}
        self.batches = BatchLog(settings.buffer_steps if settings.replay_endpoint else 0)
        self._sockets: ZmqSockets | None = None

    @property
    def endpoints(self) -> tuple[str, str]:
        """Where it publishes and where it replays, once it is open."""
        return ("", "") if self._sockets is None else (self._sockets.endpoint, self._sockets.replay_endpoint)

    def open(self) -> None:
        """Bind the sockets. Raises StartError."""
        self._sockets = ZmqSockets(self._settings.endpoint, self._settings.replay_endpoint)
        log.info("publishing KV events at %s, replays at %s", self._sockets.endpoint, self._sockets.replay_endpoint)

    async def run(self) -> None:
        """Publish until the feed ends. What cannot be published is logged, and fails nobody else."""
        sockets = self._sockets
        assert sockets is not None
        try:
            async with asyncio.TaskGroup() as tasks:
                replaying = tasks.create_task(self._replay(sockets)) if sockets.replay_endpoint else None
                await self._publish(sockets)
                if replaying is not None:
                    replaying.cancel()
        except* Exception as group:
            log.error("no KV events are published any more", exc_info=group.exceptions[0])
        finally:
            await sockets.aclose()

    async def _publish(self, sockets: ZmqSockets) -> None:
        async with aclosing(self._feed.follow(None, _IDLE_S, Channel.ZMQ)) as steps:
            first = True
            async for step in steps:
                if isinstance(step, Snapshot):
                    self._begin(sockets, cleared=self._settings.clear or not first)
                    first = False
                    for place, keys in step.pages:
                        for start in range(0, len(keys), _BLOCKS_AT_ONCE):
                            some = keys[start : start + _BLOCKS_AT_ONCE]
                            self._tell(sockets, place.model, [ResidencyEvent(True, place, key) for key in some])
                            await asyncio.sleep(0)
                else:
                    for model, events in groupby(step.events, key=lambda event: event.place.model):
                        self._tell(sockets, model, events)
                    await asyncio.sleep(0)  # there may be more at once, and others have work too

    def _begin(self, sockets: ZmqSockets, *, cleared: bool) -> None:
        for blocks in self._blocks.values():
            blocks.clear()
        if cleared:
            for topic in dict.fromkeys(self._topics.values()):
                self._send(sockets, topic, [write_event(self._settings.form, (), None)])

    def _tell(self, sockets: ZmqSockets, model: str, events: Iterable[ResidencyEvent]) -> None:
        blocks = self._blocks[model]
        changes: list[BlockChange] = list(blocks.take(events))
        if changes:
            self._send(sockets, self._topics[model], [blocks.write(change) for change in changes])

    def _send(self, sockets: ZmqSockets, topic: bytes, events: list[object]) -> None:
        payload = encode_batch(self._clock(), events, self._settings.data_parallel_rank)
        sockets.publish(self.batches.append(topic, payload))

    async def _replay(self, sockets: ZmqSockets) -> None:
        free = asyncio.Semaphore(_REPLAYS_AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await free.acquire()  # first: requests wait in the socket, which holds so many and no more
                peer, number = await sockets.next_request()
                task = tasks.create_task(self._answer(sockets, peer, number))
                task.add_done_callback(lambda _: free.release())

    async def _answer(self, sockets: ZmqSockets, peer: bytes, number: int) -> None:
        """Send what is kept from `number` on, and the end. One who takes nothing for a while is left alone."""
        end = self.batches.next  # what comes later is published
        try:
            while number < end and (step := self.batches.since(number, _REPLAY_STEP)):
                for batch in step:
                    await _hand_over(sockets, peer, batch)
                number = step[-1].number + 1
                await asyncio.sleep(0)
            await _hand_over(sockets, peer, None)
        except (PeerGoneError, TimeoutError):
            log.info("a replay was not taken to its end")


async def _hand_over(sockets: ZmqSockets, peer: bytes, batch: Batch | None) -> None:
    """Send what was asked for as soon as the peer has room. Raises PeerGoneError, TimeoutError."""
    async with asyncio.timeout(_PEER_PATIENCE_S):
        while True:
            if await sockets.answer(peer, batch):
                return
            await asyncio.sleep(_FULL_PAUSE_S)  # no event tells when there is room for one peer
