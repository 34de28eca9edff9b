"""The storage kinds `redis` and `lmcache-redis`."""

import asyncio
import os
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from forestage.config.redis_target import RedisTopology, redis_target
from forestage.core.errors import StartError, StorageUnavailableError
from forestage.core.layout import ModelLayout
from forestage.storage.base import Buffer, PageRead, Presence, Probe, ReadOutcome, Report, Storage
from forestage.storage.redis.batch import Batch, ValueRead
from forestage.storage.redis.cluster import Cluster
from forestage.storage.redis.commands import set_value, unlink
from forestage.storage.redis.directory import Directory, OneServer
from forestage.storage.redis.dispatch import Dispatch, Kind
from forestage.storage.redis.door import Door
from forestage.storage.redis.errand import Errand
from forestage.storage.redis.lane import Lane
from forestage.storage.redis.names import LmcacheNames, Names, OwnNames, ShardName
from forestage.storage.redis.node import Node
from forestage.storage.redis.order import Change, Order
from forestage.storage.redis.probing import probe_blocks
from forestage.storage.redis.question import Question
from forestage.storage.redis.scan import scan_pages, scan_values
from forestage.storage.redis.sentinel import Sentinels
from forestage.storage.redis.tls import TLS_FILES

__all__ = ["LmcacheRedisStorage", "RedisStorage", "useful_connections"]

T = TypeVar("T", bound=Hashable)
E = TypeVar("E", bound=Errand[Any])

IN_FLIGHT_BYTES = 4 << 20  # of replies due, by server, over all connections
# Part of the probe timeout after which a node of a cluster has failed: the others' answers are worth having.
_NODE_SHARE = 0.6


def useful_connections(configured: int) -> int:
    """Return how many of the configured connections are worth reading on: one a core, and one that waits meanwhile.

    Reading is copying: more threads at it would, like the event loop and a Redis beside us, only wait for cores.
    """
    return min(configured, len(os.sched_getaffinity(0)) + 1)


class RedisStorage(Storage):
    """Pages as strings whose trailer vouches for name, size and content."""

    kind = "redis"
    batch_bytes = 4 << 20

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "forestage",
        connections: int = 4,
        ttl_s: int = 0,
        probe_timeout_s: float = 1.0,
        stall_timeout_s: float = 2.0,
        names: Names | None = None,
    ) -> None:
        """Connect to nothing yet. Raises ValueError for a URL that is none.

        Args:
            url: in one of the spellings of `redis_target`.
            prefix: first part of every Redis key.
            connections: how many read at once, by server; probes and writes have their own.
            ttl_s: how long values stay, in seconds; 0 for as long as Redis likes.
            probe_timeout_s: how long connecting, and each answer on the way in, may take; a node of a cluster that
                takes more than a part of it for a probe has failed.
            names: what values are called and look like; by default those of the own format.
            stall_timeout_s: without a byte for so long, a connection to a node of a cluster is given up; to a single
                server for twice as long, because who reads from it is expected to notice before.
        """
        self._target = target = redis_target(url)
        self._names = names or OwnNames(prefix)
        self._is_cluster = target.topology is RedisTopology.CLUSTER
        door = Door(
            target.options,
            tls=target.tls,
            timeout_s=probe_timeout_s,
            patience_s=stall_timeout_s * (1 if self._is_cluster else 2),
            trailer_bytes=self._names.trailer_bytes,
        )
        self._door = door
        self._directory: Directory
        match target.topology:
            case RedisTopology.CLUSTER:
                self._directory = Cluster(target.addresses, door, connections)
            case RedisTopology.SENTINEL:
                way_in = Door(target.sentinel_options, tls=target.tls, timeout_s=probe_timeout_s, patience_s=1.0)
                sentinels = Sentinels(target.addresses, target.service, way_in)
                self._directory = OneServer(door, sentinels.locate, connections, only_primary=True)
            case RedisTopology.ONE:
                address = target.addresses[0]
                self._directory = OneServer(door, lambda: address, connections, only_primary=False)
        self._ttl_s = ttl_s
        self._node_timeout_s = _NODE_SHARE * probe_timeout_s if self._is_cluster else None
        self._window_bytes = max(1, IN_FLIGHT_BYTES // connections)
        # So that each connection finds the next batch when it ends one, and no more: those behind must wait for these.
        self.batches_in_flight = connections + 2
        self._reading: dict[PageRead, Dispatch[ValueRead, Lane]] = {}
        self._running: set[Dispatch[Any, Any]] = set()
        self._is_closed = False

    async def open(self) -> None:
        """Look whether the server lets us in. Raises StartError when a TLS file cannot be read."""
        for option in TLS_FILES:
            path = self._target.options.get(option)
            if path is not None and not os.access(path, os.R_OK):
                raise StartError(f"storage.{self.kind}.url: {option}: cannot read {path}")
        await self._directory.ready()
        if self._names.absent is not None:
            await self._ask([self._names.absent])

    async def probe(self, model: ModelLayout, probe: Probe) -> Presence:
        self._require_open()
        num_pages = len(probe.keys)
        masks = tuple(bytearray(num_pages) for _ in model.components)
        for block in probe_blocks(model, probe, self._names.of(model)):
            flags, unasked = await self._ask(block.names)
            block.enter(masks, flags)
            gap = block.first_gap(model, probe, masks)
            if gap is not None:
                for mask in masks:
                    mask[gap:] = bytes(num_pages - gap)
                return Presence(masks, gap if block.asks_for(gap, unasked) else None)
        return Presence(masks)

    async def read_into(self, model: ModelLayout, reads: Sequence[PageRead], report: Report) -> None:
        if not reads:
            return
        batch = Batch(reads, report, self._names.of(model))

        def make(node: Node, values: Sequence[ValueRead], asking: bool) -> Lane:
            return Lane(node, values, batch, self._window_bytes, asking=asking)

        kind = Kind(ValueRead.redis_name, make, lambda node: node.readers)
        dispatch = self._reading[reads[0]] = Dispatch(self._directory, kind)
        rest = ReadOutcome.UNREACHABLE
        try:
            self._require_open()
            if await self._carry(dispatch, batch.values):
                # A failed node of several is a matter of the pages that it has, not of the storage.
                rest = ReadOutcome.ERROR if self._directory.any_well() else ReadOutcome.UNREACHABLE
        except StorageUnavailableError:
            pass
        except asyncio.CancelledError:
            rest = ReadOutcome.STOPPED
            raise
        finally:
            del self._reading[reads[0]]
            batch.end_rest(ReadOutcome.STOPPED if dispatch.is_broken_off else rest)

    def stalled(self, reads: Sequence[PageRead]) -> None:
        dispatch = self._reading.get(reads[0])
        if dispatch is not None:
            dispatch.break_off()

    async def write(self, model: ModelLayout, component_index: int, key: bytes, shards: Sequence[Buffer]) -> None:
        component = model.components[component_index]
        if [len(shard) for shard in shards] != [component.bytes] * component.shards:
            raise ValueError(f"{component.name}: want {component.shards} shards of {component.bytes} bytes")
        names = self._names.of(model)[component_index]
        await self._change(
            [
                Change(name.name_of(key), partial(_set, name, key, payload, self._ttl_s), is_counted=False)
                for name, payload in zip(names, shards, strict=True)
            ]
        )

    async def delete(self, model: ModelLayout, component_index: int, key: bytes) -> bool:
        names = [shard.name_of(key) for shard in self._names.of(model)[component_index]]
        return await self._change([Change(name, partial(_unlink, name), is_counted=True) for name in names]) > 0

    def iter_pages(self, model: ModelLayout) -> Iterator[tuple[int, bytes]]:
        """Yield (component index, key) of every page that is there in whole, going by names. Blocking, for a thread.

        Raises StorageUnavailableError.
        """
        return scan_pages(self._door, self._directory.addresses(), model, self._names.of(model))

    def iter_values(self, model: ModelLayout) -> Iterator[tuple[int, bytes, int, int]]:
        """Yield (component index, key, shard, stored bytes) of every value, -1 bytes for what is none. For a thread.

        Raises StorageUnavailableError.
        """
        return scan_values(self._door, self._directory.addresses(), model, self._names.of(model))

    async def aclose(self) -> None:
        self._is_closed = True
        for dispatch in self._running:
            dispatch.break_off()
        await self._directory.aclose()

    @property
    def trailer_bytes(self) -> int:
        """What a value has behind its payload."""
        return self._names.trailer_bytes

    @property
    def num_links(self) -> int:
        """How many connections are open, over all servers."""
        return sum(node.num_links for node in self._directory.nodes())

    def check_integrity(self) -> None:
        """Raise AssertionError when a law of the nodes does not hold."""
        for node in self._directory.nodes():
            node.check_integrity()

    async def _ask(self, names: list[bytes]) -> tuple[bytearray, Sequence[int]]:
        """Return which names exist, 1 for each that does, and the places of those that could not be asked for.

        Raises StorageUnavailableError when no node answers.
        """
        self._require_open()

        def make(node: Node, places: Sequence[int], asking: bool) -> Question:
            return Question(node, places, names, asking=asking)

        kind = Kind(names.__getitem__, make, lambda node: node.probers, self._node_timeout_s)
        dispatch: Dispatch[int, Question] = Dispatch(self._directory, kind)
        left = await self._carry(dispatch, range(len(names)))
        if dispatch.is_broken_off or (left and not self._directory.any_well()):
            raise dispatch.failure or StorageUnavailableError("no node answers")
        if not left and len(dispatch.errands) == 1:
            return dispatch.errands[0].flags, ()
        flags = bytearray(len(names))
        for question in dispatch.errands:
            if not question.todo:
                for place, flag in zip(question.places, question.flags, strict=True):
                    flags[place] |= flag
        return flags, left

    async def _change(self, changes: Sequence[Change]) -> int:
        """Make changes and return what the counted ones add up to. Raises StorageUnavailableError or OSError."""
        self._require_open()
        kind = Kind(Change.redis_name, Order.at, lambda node: node.writers)
        dispatch: Dispatch[Change, Order] = Dispatch(self._directory, kind)
        if await self._carry(dispatch, changes):
            raise dispatch.failure or StorageUnavailableError("no node takes the changes")
        for order in dispatch.errands:
            for error in order.refused:
                raise error.as_write_error()
        return sum(order.count for order in dispatch.errands)

    async def _carry(self, dispatch: Dispatch[T, E], things: Sequence[T]) -> list[T]:
        self._running.add(dispatch)
        try:
            return await dispatch.carry(things)
        finally:
            self._running.discard(dispatch)

    def _require_open(self) -> None:
        if self._is_closed:
            raise StorageUnavailableError("the storage is closed")


class LmcacheRedisStorage(RedisStorage):
    """Pages that LMCache wrote or will read: raw payloads that only their exact size vouches for."""

    kind = "lmcache-redis"

    def __init__(
        self,
        url: str,
        *,
        connections: int = 4,
        ttl_s: int = 0,
        probe_timeout_s: float = 1.0,
        stall_timeout_s: float = 2.0,
    ) -> None:
        """Connect to nothing yet; see RedisStorage."""
        super().__init__(
            url,
            connections=connections,
            ttl_s=ttl_s,
            probe_timeout_s=probe_timeout_s,
            stall_timeout_s=stall_timeout_s,
            names=LmcacheNames(),
        )


def _set(name: ShardName, key: bytes, payload: Buffer, ttl_s: int) -> tuple[Buffer, ...]:
    return set_value(name.name_of(key), payload, name.seal(payload, key), ttl_s)


def _unlink(name: bytes) -> tuple[Buffer, ...]:
    return (unlink(name),)
