"""What a page shard is called in Redis, and what its values look like.

Own format: `prefix:fingerprint:component:shard:` and the bytes of the page key; behind the payload lies a trailer.
There is no hash tag, so in a cluster pages spread over all nodes.

LMCache (0.5.6, its multi-process server): `{model}@{rank word}@{group}@{hash}[@{salt}]`, all but the names in hex, and
the value is the payload alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from forestage.core.layout import ModelLayout
from forestage.storage.base import Buffer
from forestage.storage.envelope import TRAILER_BYTES, seal, seed_of
from forestage.storage.lmcache_names import redis_marks
from forestage.storage.redis.reply_stream import value_header

__all__ = ["LmcacheNames", "Names", "OwnNames", "ShardName"]

_MIN_KEY, _MAX_KEY = 16, 64  # bytes
_HEX = frozenset(b"0123456789abcdef")


@dataclass(frozen=True, slots=True)
class ShardName:
    """One shard of one component: `head`, page key (raw, or `in_hex`) and `ending` make the name of a value.

    `value_header` is how the reply with a value begins. Without a `seed` values have no trailer.
    """

    head: bytes
    seed: int | None
    value_header: bytes
    ending: bytes = b""
    in_hex: bool = False

    def name_of(self, key: bytes) -> bytes:
        """Return the name of the value that this shard of a page has."""
        return self.head + key.hex().encode() + self.ending if self.in_hex else self.head + key

    def names_of(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the names for several pages."""
        head = self.head
        return [self.name_of(key) for key in keys] if self.in_hex else [head + key for key in keys]

    def key_of(self, name: bytes) -> bytes | None:
        """Return the page key in a name; None for one that is not of this shard."""
        if not (name.startswith(self.head) and name.endswith(self.ending)):
            return None
        key = name[len(self.head) : len(name) - len(self.ending)]
        if self.in_hex:
            key = bytes.fromhex(key.decode()) if _HEX.issuperset(key) and len(key) % 2 == 0 else b""
        return key if _MIN_KEY <= len(key) <= _MAX_KEY else None

    def seal(self, payload: Buffer, key: bytes) -> bytes:
        """Return the trailer that vouches for a payload under the name of a page; nothing where there is none."""
        return b"" if self.seed is None else seal(payload, key, self.seed)


class Names(ABC):
    """The names of all pages in one Redis. `trailer_bytes` is what a value has behind its payload."""

    trailer_bytes: int
    #: A name that is never there, but that whoever may read pages may ask for; None if there is no such name.
    absent: bytes | None

    def __init__(self) -> None:
        self._known: dict[ModelLayout, tuple[tuple[ShardName, ...], ...]] = {}

    def of(self, model: ModelLayout) -> tuple[tuple[ShardName, ...], ...]:
        """Return the shards of each component. Raises ValueError for a model that cannot be named."""
        names = self._known.get(model)
        if names is None:
            names = self._known[model] = tuple(self._shards(model, index) for index in range(len(model.components)))
        return names

    @abstractmethod
    def _shards(self, model: ModelLayout, component_index: int) -> tuple[ShardName, ...]:
        """Return the shards of one component."""


class OwnNames(Names):
    """Those of our own format, under one prefix."""

    trailer_bytes = TRAILER_BYTES

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix
        self.absent = f"{prefix}:".encode()

    def _shards(self, model: ModelLayout, component_index: int) -> tuple[ShardName, ...]:
        component = model.components[component_index]
        return tuple(
            ShardName(
                f"{self._prefix}:{model.fingerprint}:{component.name}:{shard}:".encode(),
                seed_of(model.fingerprint, component.name, shard),
                value_header(component.bytes, TRAILER_BYTES),
            )
            for shard in range(component.shards)
        )


class LmcacheNames(Names):
    """Those that LMCache gives its chunks: any user of it may see only some, so there is none that all may ask for."""

    trailer_bytes = 0
    absent = None

    def _shards(self, model: ModelLayout, component_index: int) -> tuple[ShardName, ...]:
        header = value_header(model.components[component_index].bytes, 0)
        marks = redis_marks(model, component_index)
        return tuple(ShardName(head.encode(), None, header, ending.encode(), in_hex=True) for head, ending in marks)
