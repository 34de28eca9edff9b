"""What a page shard is called in Redis: `prefix:fingerprint:component:shard:` and the bytes of the page key.

There is no hash tag, so in a cluster pages spread over all nodes.
"""

from dataclasses import dataclass

from forestage.core.layout import ModelLayout
from forestage.storage.envelope import seed_of
from forestage.storage.redis.reply_stream import value_header

__all__ = ["Names", "ShardName"]


@dataclass(frozen=True, slots=True)
class ShardName:
    """One shard of one component: how its Redis keys begin, and what its values look like."""

    head: bytes
    seed: int
    value_header: bytes


class Names:
    """The names of all pages under one prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._known: dict[ModelLayout, tuple[tuple[ShardName, ...], ...]] = {}

    def of(self, model: ModelLayout) -> tuple[tuple[ShardName, ...], ...]:
        """Return the shards of each component."""
        names = self._known.get(model)
        if names is None:
            names = self._known[model] = tuple(
                tuple(
                    ShardName(
                        f"{self.prefix}:{model.fingerprint}:{component.name}:{shard}:".encode(),
                        seed_of(model.fingerprint, component.name, shard),
                        value_header(component.bytes),
                    )
                    for shard in range(component.shards)
                )
                for component in model.components
            )
        return names
