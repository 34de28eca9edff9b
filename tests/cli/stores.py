"""Storages behind a configuration file, for the tests of `forestage l3`, and a way to their values past the storage."""

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from forestage.assembly import build_storage
from forestage.config import load
from forestage.core.layout import ModelLayout
from forestage.storage.hicache_names import name_endings
from support.redis_servers import RedisServer

__all__ = ["FileStore", "HicacheStore", "LmcacheRedisStore", "RedisStore", "Store", "keys_of", "payload_of"]

_CONFIG = """
[pool]
path = "{folder}/pool"
bytes = "8MiB"
pin = "none"
[storage]
{storage}
[[models]]
name = "m"
page_tokens = 16
shards = 2
[[models.components]]
name = "kv"
bytes = 4096
[[models.components]]
name = "state"
bytes = 1000
covers = "tail"
window = 1
[[models]]
name = "other"
page_tokens = 16
[[models.components]]
name = "kv"
bytes = 4096
"""


def keys_of(count: int, chain: str = "a") -> list[bytes]:
    """Page keys in the order in which they are listed."""
    return sorted(hashlib.sha256(f"{chain}|{page}".encode()).digest() for page in range(count))


def payload_of(key: bytes, component: str, shard: int, size: int) -> bytes:
    """The content of one shard of a page."""
    block = hashlib.sha256(f"{component}|{shard}|".encode() + key).digest()
    return (block * (size // len(block) + 1))[:size]


class Store(ABC):
    """One configured storage. `extra_bytes` is what it adds to each payload."""

    kind: str
    extra_bytes: int

    def __init__(self, folder: Path, storage: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.config = folder / "forestage.toml"
        self.config.write_text(_CONFIG.format(folder=folder, storage=storage))
        self.model: ModelLayout = load(str(self.config), {}).layouts()[0]

    def fill(self, keys: Sequence[bytes], states: Sequence[bytes] = ()) -> None:
        """Write pages, and states for some of them."""

        async def write() -> None:
            storage = build_storage(load(str(self.config), {}))
            await storage.open()
            for index, names in enumerate((keys, states)):
                component = self.model.components[index]
                for key in names:
                    shards = [payload_of(key, component.name, s, component.bytes) for s in range(component.shards)]
                    await storage.write(self.model, index, key, shards)
            await storage.aclose()

        asyncio.run(write())

    @abstractmethod
    def get(self, component: int, key: bytes, shard: int) -> bytes | None:
        """Return a value as it is stored."""

    @abstractmethod
    def set(self, component: int, key: bytes, shard: int, value: bytes | None) -> None:
        """Replace a value, None: remove it."""


class _Directory(Store):
    @abstractmethod
    def path(self, component: int, key: bytes, shard: int) -> Path:
        """Where a value lies."""

    def get(self, component: int, key: bytes, shard: int) -> bytes | None:
        path = self.path(component, key, shard)
        return path.read_bytes() if path.exists() else None

    def set(self, component: int, key: bytes, shard: int, value: bytes | None) -> None:
        if value is None:
            self.path(component, key, shard).unlink()
        else:
            self.path(component, key, shard).write_bytes(value)


class FileStore(_Directory):
    kind = "file"
    extra_bytes = 96

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, f'kind = "file"\n[storage.file]\nroot = "{folder}/l3"')

    def path(self, component: int, key: bytes, shard: int) -> Path:
        name = self.model.components[component].name
        return self.folder / "l3" / self.model.fingerprint / name / key.hex()[:2] / f"{key.hex()}-{shard}.page"


class HicacheStore(_Directory):
    kind = "hicache-file"
    extra_bytes = 0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, f'kind = "hicache-file"\n[storage.hicache-file]\nroot = "{folder}/l3"')
        (folder / "l3").mkdir(exist_ok=True)

    def path(self, component: int, key: bytes, shard: int) -> Path:
        return self.folder / "l3" / (key.hex() + name_endings(self.model, component)[shard])


class RedisStore(Store):
    kind = "redis"
    extra_bytes = 96

    def __init__(self, folder: Path, server: RedisServer) -> None:
        super().__init__(folder, f'kind = "redis"\n[storage.redis]\nurl = "{server.url}"')
        self.server = server

    def name(self, component: int, key: bytes, shard: int) -> bytes:
        """The Redis key of a value."""
        component_name = self.model.components[component].name
        return f"forestage:{self.model.fingerprint}:{component_name}:{shard}:".encode() + key

    def get(self, component: int, key: bytes, shard: int) -> bytes | None:
        value: bytes | None = self.server.command("GET", self.name(component, key, shard))
        return value

    def set(self, component: int, key: bytes, shard: int, value: bytes | None) -> None:
        name = self.name(component, key, shard)
        if value is None:
            self.server.command("DEL", name)
        else:
            self.server.command("SET", name, value)


class LmcacheRedisStore(RedisStore):
    kind = "lmcache-redis"
    extra_bytes = 0

    def __init__(self, folder: Path, server: RedisServer) -> None:
        Store.__init__(self, folder, f'kind = "lmcache-redis"\n[storage.lmcache-redis]\nurl = "{server.url}"')
        self.server = server

    def name(self, component: int, key: bytes, shard: int) -> bytes:
        world = self.model.components[component].shards
        rank = world << 24 | shard << 16 | world << 8 | shard
        return f"{self.model.name}@{rank:08x}@{component:x}@{key.hex()}".encode()
