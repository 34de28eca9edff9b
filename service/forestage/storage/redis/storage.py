"""The storage kind `redis`."""

from collections.abc import Sequence

import redis.connection

from forestage.core.errors import StorageUnavailableError
from forestage.core.layout import ModelLayout
from forestage.storage.base import Buffer, PageRead, Presence, Probe, ReadOutcome, Report, Storage
from forestage.storage.envelope import seal
from forestage.storage.redis.batch import Batch, ValueRead
from forestage.storage.redis.door import Door
from forestage.storage.redis.errand import Run, outlast
from forestage.storage.redis.lane import Lane
from forestage.storage.redis.names import Names
from forestage.storage.redis.node import Node
from forestage.storage.redis.order import Command, Order, set_command, unlink_command
from forestage.storage.redis.question import Question

__all__ = ["RedisStorage"]

IN_FLIGHT_BYTES = 4 << 20  # of replies due, by server, over all connections


class RedisStorage(Storage):
    """Pages as strings whose trailer vouches for name, size and content."""

    kind = "redis"

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "forestage",
        connections: int = 4,
        ttl_s: int = 0,
        probe_timeout_s: float = 1.0,
        stall_timeout_s: float = 2.0,
    ) -> None:
        """Connect to nothing yet."""
        options = redis.connection.parse_url(url)  # type: ignore[no-untyped-call]
        kind = options.pop("connection_class", None)
        if "path" in options:
            address = options.pop("path"), 0
        else:
            address = options.pop("host", "localhost"), options.pop("port", 6379)
        door = Door(
            options,
            tls=kind is redis.connection.SSLConnection,
            timeout_s=probe_timeout_s,
            patience_s=2 * stall_timeout_s,
        )
        self._node = Node("one", door, lambda: address, connections)
        self._names = Names(prefix)
        self._ttl_s = ttl_s
        self._window_bytes = IN_FLIGHT_BYTES // connections
        self.batches_in_flight = 2 * connections
        self._running: dict[PageRead, list[Run]] = {}
        self._runs: set[Run] = set()

    async def probe(self, model: ModelLayout, probe: Probe) -> Presence:
        names = self._names.of(model)
        num = len(probe.keys)
        asked: list[bytes] = []
        spans = []
        for index, component in enumerate(model.components):
            first = probe.first_tail if component.is_tail else probe.first_page
            for shard in names[index]:
                asked += [shard.head + key for key in probe.keys[first:]]
                spans.append((index, first))
        masks = tuple(bytearray(num) for _ in model.components)
        if not asked:
            return Presence(masks)
        question = Question(self._node, asked)
        await outlast([Run(self._node.probers, question)])
        if question.failure is not None:
            raise question.failure
        if question.errors:
            raise StorageUnavailableError(str(question.errors[0][1]))
        at = 0
        seen: set[int] = set()
        for index, first in spans:
            part = question.flags[at : at + num - first]
            at += len(part)
            if index in seen:
                old = masks[index]
                both = int.from_bytes(old[first:], "big") & int.from_bytes(part, "big")
                part = bytearray(both.to_bytes(num - first, "big"))
            seen.add(index)
            masks[index][first:] = part
        return Presence(masks)

    async def read_into(self, model: ModelLayout, reads: Sequence[PageRead], report: Report) -> None:
        if not reads:
            return
        batch = Batch(reads, report, self._names.of(model))
        lane = Lane(self._node, batch, batch.values, self._window_bytes)
        try:
            run = Run(self._node.readers, lane)
        except StorageUnavailableError:
            self._end(batch, lane.todo, ReadOutcome.UNREACHABLE)
            return
        self._running[reads[0]] = [run]
        try:
            await outlast([run])
        finally:
            del self._running[reads[0]]
            outcome = ReadOutcome.STOPPED if lane.is_broken_off else ReadOutcome.UNREACHABLE
            self._end(batch, [*lane.todo, *(value for value, _ in lane.redirected)], outcome)

    def stalled(self, reads: Sequence[PageRead]) -> None:
        for run in self._running.get(reads[0], ()):
            run.break_off()

    async def write(self, model: ModelLayout, component_index: int, key: bytes, shards: Sequence[Buffer]) -> None:
        component = model.components[component_index]
        if [len(shard) for shard in shards] != [component.bytes] * component.shards:
            raise ValueError(f"{component.name}: want {component.shards} shards of {component.bytes} bytes")
        names = self._names.of(model)[component_index]
        await self._carry_out(
            [
                set_command(name.head + key, shard, seal(shard, key, name.seed), self._ttl_s)
                for name, shard in zip(names, shards, strict=True)
            ]
        )

    async def delete(self, model: ModelLayout, component_index: int, key: bytes) -> bool:
        names = self._names.of(model)[component_index]
        return bool(await self._carry_out([unlink_command(name.head + key) for name in names]))

    async def aclose(self) -> None:
        self._node.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when a law does not hold."""
        self._node.check_integrity()

    async def _carry_out(self, commands: Sequence[Command]) -> int:
        order = Order(self._node, commands)
        await outlast([Run(self._node.writers, order)])
        if order.failure is not None:
            raise order.failure
        if order.errors:
            raise OSError(str(order.errors[0][1]))
        return order.total

    def _end(self, batch: Batch, values: Sequence[ValueRead], outcome: ReadOutcome) -> None:
        for value in values:
            batch.end(value, outcome)
