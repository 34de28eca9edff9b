"""A hybrid model over a directory in SGLang's format: chains of pages with a state after every eighth one."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forestage.config import load
from forestage.core.layout import ModelLayout
from forestage.storage.hicache_names import file_names

__all__ = ["COMPONENTS", "MODEL", "SLOTS", "STATE_EVERY", "Store", "chain", "page_bytes"]

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
[writes]
expire_ms = {{expire_ms}}
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
slots = {{slots}}
[[models.components]]
name = "state"
bytes = {PAGE_BYTES}
slots = {{states}}
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
    layout: ModelLayout
    root: Path
    chains: tuple[list[bytes], ...]
    whole: list[bytes]

    @classmethod
    def make(
        cls, folder: Path, pool: Path, *, slots: int = SLOTS, states: int = STATES, expire_ms: int = 30_000
    ) -> "Store":
        root, config = folder / "hicache", folder / "forestage.toml"
        root.mkdir()
        config.write_text(_CONFIG.format(pool=pool, root=root, slots=slots, states=states, expire_ms=expire_ms))
        (layout,) = load(str(config), {}).layouts()
        chains = tuple(chain(f"c{i}", 32) for i in range(8))
        store = cls(config, pool, layout, root, chains, chain("whole", slots))
        for keys in (*store.chains, store.whole):
            store._put(keys)
        return store

    def _put(self, keys: Sequence[bytes]) -> None:
        for length, key in enumerate(keys, 1):
            for component in COMPONENTS:
                if component == "kv" or length % STATE_EVERY == 0:
                    self._file(component, key).write_bytes(page_bytes(key, component))

    def _file(self, component: str, key: bytes) -> Path:
        return self.root / file_names(self.layout, COMPONENTS.index(component), key)[0]

    def has(self, component: str, key: bytes) -> bool:
        """Say whether L3 has a page; raises AssertionError for other bytes than those of the page."""
        try:
            found = self._file(component, key).read_bytes()
        except FileNotFoundError:
            return False
        assert found == page_bytes(key, component)
        return True

    def take_away(self) -> None:
        """Let L3 vanish: where its directory was, nothing can be written."""
        self.root.rename(self._away)
        self.root.write_text("in the way")

    def bring_back(self) -> None:
        """Undo `take_away`, if it was done."""
        if self._away.exists():
            self.root.unlink()
            self._away.rename(self.root)

    @property
    def _away(self) -> Path:
        return self.root.with_name("away")
