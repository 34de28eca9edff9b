"""Layouts, keys and page bytes for pool tests: a page repeats 32 bytes made of its key, so that any wrong one shows."""

import hashlib

from forestage.core.layout import Component, Covers, ModelLayout
from forestage.pool.file import PoolFile

KV_BYTES = 65536

DEMO = ModelLayout("demo", 64, (Component("kv", KV_BYTES),))
HYBRID = ModelLayout(
    "acme/hybrid",
    16,
    (
        Component("kv", 5000, shards=2),
        Component("mamba", 100, shards=3, covers=Covers.TAIL, window=1, slots=5),
    ),
    shards=2,
)


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "big")).digest()


def payload(key: bytes, size: int, shard: int = 0) -> bytes:
    """Return the bytes of one shard of a page; hammer.c knows the rule too."""
    block = key[:24].ljust(24, b"\0") + hashlib.sha256(key + bytes([shard])).digest()[:8]
    return (block * (size // len(block) + 1))[:size]


def fill(pool: PoolFile, region_index: int, slot: int, key: bytes, page: int = 0, dirty: bool = False) -> bytes:
    """Put the page of `key` into a slot; return what a reader must get."""
    pool.tables[region_index].begin_fill(slot)
    shards = []
    for shard, view in enumerate(pool.shard_views(region_index, slot)):
        view[:] = payload(key, len(view), shard)
        shards.append(bytes(view))
    pool.tables[region_index].publish(slot, key, page=page, dirty=dirty)
    return b"".join(shards)
