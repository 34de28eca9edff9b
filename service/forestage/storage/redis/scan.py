"""A walk over everything that a model has in Redis. Blocking."""

import re
from collections.abc import Iterator, Sequence

from forestage.core.layout import ModelLayout
from forestage.storage.redis.door import Address, Door
from forestage.storage.redis.names import ShardName

__all__ = ["scan_pages"]

_PER_CALL = 1000  # keys that one SCAN looks at
_MIN_KEY, _MAX_KEY = 16, 64  # bytes


def scan_pages(
    door: Door, servers: Sequence[Address], model: ModelLayout, names: Sequence[Sequence[ShardName]]
) -> Iterator[tuple[int, bytes]]:
    """Yield (component index, key) of every page that has all its shards, each once, in no order.

    Pages written or removed meanwhile may be missing or not. Keeps a little of every page in memory. Raises
    StorageUnavailableError.
    """
    places = {shard.head: (index, number) for index, shards in enumerate(names) for number, shard in enumerate(shards)}
    wanted = [(1 << component.shards) - 1 for component in model.components]
    found: dict[tuple[int, bytes], int] = {}
    for server in servers:
        for name in _scan(door, server, _common_head(list(places))):
            place = _place(places, name)
            if place is None:
                continue
            component, shard, key = place
            had = found.get((component, key), 0)
            has = found[component, key] = had | 1 << shard
            if has == wanted[component] != had:
                yield component, key


def _scan(door: Door, server: Address, head: bytes) -> Iterator[bytes]:
    pattern = re.sub(rb"([*?\[\]\\^-])", rb"\\\1", head) + b"*"
    with door.session(server) as session:
        cursor = b"0"
        while True:
            cursor, batch = session.ask("SCAN", cursor, "MATCH", pattern, "COUNT", _PER_CALL)
            yield from batch
            if cursor == b"0":
                return


def _place(places: dict[bytes, tuple[int, int]], name: bytes) -> tuple[int, int, bytes] | None:
    for head, (component, shard) in places.items():
        if name.startswith(head) and _MIN_KEY <= len(name) - len(head) <= _MAX_KEY:
            return component, shard, name[len(head) :]
    return None


def _common_head(heads: Sequence[bytes]) -> bytes:
    """Return `prefix:fingerprint:`, which all heads of a model begin with."""
    return heads[0].rsplit(b":", 3)[0] + b":"
