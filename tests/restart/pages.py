"""A hybrid model over a directory in SGLang's format: chains of pages with a state after every eighth one."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forestage.config import load
from forestage.storage.hicache_names import file_names

__all__ = ["COMPONENTS", "MODEL", "SLOTS", "Store", "chain", "page_bytes"]

MODEL = "m"
COMPONENTS = ("kv", "state")
PAGE_BYTES = 128 << 10
SLOTS, STATES = 48, 6
STATE_EVERY = 8

_CONFIG = f"""
[server]
port = 0
[pool]
path = "{{pool}}"
bytes = "64MiB"
pin = "none"
[storage]
kind = "hicache-file"
[storage.hicache-file]
root = "{{root}}"
[[models]]
name = "{MODEL}"
page_tokens = 16
[[models.components]]
name = "kv"
bytes = {PAGE_BYTES}
slots = {SLOTS}
[[models.components]]
name = "state"
bytes = {PAGE_BYTES}
slots = {STATES}
covers = "tail"
"""


def chain(name: str, length: int) -> list[bytes]:
    """Keys of a prefix; other names share nothing."""
    return [hashlib.sha256(f"{name}|{page}".encode()).digest() for page in range(length)]


def page_bytes(key: bytes, component: str) -> bytes:
    """Return the bytes of a page, by the rule of pool/hammer.c."""
    block = key[:24] + hashlib.sha256(component.encode() + key).digest()[:8]
    return block * (PAGE_BYTES // len(block))


@dataclass(frozen=True)
class Store:
    """L3, and the configuration of a service over it. `whole` is a prefix that takes every slot of the pool."""

    config: Path
    pool: Path
    chains: tuple[list[bytes], ...]
    whole: list[bytes]

    @classmethod
    def make(cls, folder: Path, pool: Path) -> "Store":
        root, config = folder / "hicache", folder / "forestage.toml"
        root.mkdir()
        config.write_text(_CONFIG.format(pool=pool, root=root))
        layout = load(str(config), {}).layouts()[0]

        def put(keys: Sequence[bytes]) -> None:
            for length, key in enumerate(keys, 1):
                for c, component in enumerate(COMPONENTS):
                    if component == "kv" or length % STATE_EVERY == 0:
                        (root / file_names(layout, c, key)[0]).write_bytes(page_bytes(key, component))

        store = cls(config, pool, tuple(chain(f"c{i}", 32) for i in range(8)), chain("whole", SLOTS))
        for keys in (*store.chains, store.whole):
            put(keys)
        return store
