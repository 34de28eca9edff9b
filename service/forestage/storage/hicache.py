"""L3 in the flat directory of SGLang's file backend: raw payloads that only their exact size vouches for."""

from collections.abc import Iterator

from forestage.core.layout import ModelLayout
from forestage.storage.directory import DirectoryStorage
from forestage.storage.hicache_names import name_endings
from forestage.storage.shelf import Shelf

__all__ = ["HicacheFileStorage"]


class HicacheFileStorage(DirectoryStorage):
    """Pages that SGLang wrote or will read. Its directory may appear after us: until then probes say unavailable."""

    kind = "hicache-file"

    def _folders(self) -> Iterator[str]:
        yield self.root

    def _shelf(self, model: ModelLayout, component_index: int) -> Shelf:
        return Shelf(
            directory=self.root,
            fans_out=False,
            endings=name_endings(model, component_index),
            payload_bytes=model.components[component_index].bytes,
        )
