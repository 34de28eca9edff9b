"""A walk over everything that a model has in Redis. Blocking."""

import itertools
import re
from collections.abc import Iterator, Sequence

from forestage.core.layout import ModelLayout
from forestage.storage.redis.door import Address, Door, Session
from forestage.storage.redis.names import ShardName

__all__ = ["scan_pages", "scan_values"]

_PER_CALL = 1000  # keys that one SCAN looks at

_Place = tuple[ShardName, int, int]  # component index and shard of what has such names


def scan_pages(
    door: Door, servers: Sequence[Address], model: ModelLayout, names: Sequence[Sequence[ShardName]]
) -> Iterator[tuple[int, bytes]]:
    """Yield (component index, key) of every page that has all its shards, each once, in no order.

    Pages written or removed meanwhile may be missing or not. Keeps a little of every page in memory. Raises
    StorageUnavailableError.
    """
    places = _places(names)
    wanted = [(1 << component.shards) - 1 for component in model.components]
    found: dict[tuple[int, bytes], int] = {}
    for server in servers:
        with door.session(server) as session:
            for name in itertools.chain.from_iterable(
                _scan(session, _common_head([shard.head for shard, _, _ in places]))
            ):
                place = _place(places, name)
                if place is None:
                    continue
                component, shard, key = place
                had = found.get((component, key), 0)
                has = found[component, key] = had | 1 << shard
                if has == wanted[component] != had:
                    yield component, key


def scan_values(
    door: Door, servers: Sequence[Address], model: ModelLayout, names: Sequence[Sequence[ShardName]]
) -> Iterator[tuple[int, bytes, int, int]]:
    """Yield (component index, key, shard, stored bytes) of every value, some of them maybe twice, in no order.

    The bytes are -1 for what is there and no string. Raises StorageUnavailableError.
    """
    places = _places(names)
    for server in servers:
        with door.session(server) as session:
            for batch in _scan(session, _common_head([shard.head for shard, _, _ in places])):
                found = [(place, name) for name in batch if (place := _place(places, name)) is not None]
                sizes = session.ask_all([("STRLEN", name) for _, name in found])
                for ((component, shard, key), _), size in zip(found, sizes, strict=True):
                    yield component, key, shard, size if isinstance(size, int) else -1


def _scan(session: Session, head: bytes) -> Iterator[list[bytes]]:
    pattern = re.sub(rb"([*?\[\]\\^-])", rb"\\\1", head) + b"*"
    cursor = b"0"
    while True:
        cursor, batch = session.ask("SCAN", cursor, "MATCH", pattern, "COUNT", _PER_CALL)
        yield batch
        if cursor == b"0":
            return


def _places(names: Sequence[Sequence[ShardName]]) -> list[_Place]:
    return [(shard, index, number) for index, shards in enumerate(names) for number, shard in enumerate(shards)]


def _place(places: Sequence[_Place], name: bytes) -> tuple[int, int, bytes] | None:
    for shard, component, number in places:
        key = shard.key_of(name)
        if key is not None:
            return component, number, key
    return None


def _common_head(heads: Sequence[bytes]) -> bytes:
    """Return what all names of a model begin with."""
    first, last = min(heads), max(heads)
    length = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    return first[:length]
