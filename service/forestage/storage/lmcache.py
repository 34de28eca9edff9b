"""L3 in the directory of LMCache's fs adapter: raw chunks that only their exact size vouches for."""

from collections.abc import Iterator

from forestage.core.layout import ModelLayout
from forestage.storage.directory import DirectoryStorage
from forestage.storage.lmcache_names import file_marks
from forestage.storage.shelf import Shelf

__all__ = ["LmcacheFileStorage"]


class LmcacheFileStorage(DirectoryStorage):
    """Pages that LMCache wrote or will read. Its directory may appear after us: until then probes say unavailable."""

    kind = "lmcache-file"

    def _folders(self) -> Iterator[str]:
        yield self.root

    def _shelf(self, model: ModelLayout, component_index: int) -> Shelf:
        marks = file_marks(model, component_index)
        return Shelf(
            directory=self.root,
            fans_out=False,
            endings=tuple(ending for _, ending in marks),
            payload_bytes=model.components[component_index].bytes,
            beginnings=tuple(beginning for beginning, _ in marks),
        )
