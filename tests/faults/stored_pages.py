"""A directory of pages in SGLang's format for a real service, whose reads and look-ups can be made to hang."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forestage.config import load
from forestage.core.layout import ModelLayout
from forestage.storage.hicache_names import name_endings
from forestage_client.pool_view import PoolView
from support.configs import write_config
from support.live import content
from support.running import HANGING, Running, running

__all__ = ["StoredPages"]


@dataclass(frozen=True)
class StoredPages:
    """`config` is for a service over `root`; start it with `HANGING` for what hangs to hang."""

    root: Path
    config: Path
    layout: ModelLayout

    @classmethod
    def make(cls, folder: Path, **settings: str) -> "StoredPages":
        root = folder / "hicache"
        root.mkdir(parents=True)
        storage = 'kind = "hicache-file"\n' + settings.pop("storage", "")
        sections = {"storage": storage, "storage.hicache-file": f'root = "{root}"', **settings}
        config = write_config(folder, **sections)  # type: ignore[arg-type]
        return cls(root, config, load(str(config), {}).layouts()[0])

    def file(self, key: bytes, component_index: int = 0) -> Path:
        return self.root / (key.hex() + name_endings(self.layout, component_index)[0])

    def store(self, keys: Iterable[bytes]) -> None:
        size = self.layout.components[0].bytes
        for key in keys:
            self.file(key).write_bytes(content(key, "kv", size))

    def hang(self, keys: Iterable[bytes], ending: str = "hang") -> None:
        """Let every read of these pages (with "lost": every look-up) hang until `release`."""
        for key in keys:
            self.file(key).with_name(f"{self.file(key).name}.{ending}").touch()

    def release(self) -> None:
        for ending in ("hang", "lost"):
            for marker in self.root.glob(f"*.{ending}"):
                marker.unlink(missing_ok=True)

    @contextmanager
    def serving(self, *more: str) -> Iterator[Running]:
        """Run a service over these pages; everything is released before it has to have ended."""
        with running(self.config, *more, entry=HANGING) as service:
            try:
                yield service
            finally:
                self.release()

    def check_slots(self, pool: str | Path, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Read pages as an engine would and compare every byte."""
        with PoolView(str(pool)) as view:
            for key, slot in zip(keys, slots, strict=True):
                expected = content(key, "kv", self.layout.components[0].bytes)
                assert view.copy(self.layout.name, "kv", slot, key) == expected
