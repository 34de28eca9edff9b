"""L3 in the directory of vLLM's fs tier: raw chunks that only their exact size vouches for."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from forestage.core.layout import ModelLayout
from forestage.storage.directory import DirectoryStorage
from forestage.storage.shelf import Shelf

__all__ = ["VllmFileStorage", "VllmShelf"]


@dataclass(frozen=True)
class VllmShelf(Shelf):
    """The chunks of one KV cache group: `directory/{hash[0:3]}/{hash[3:5]}_g{group}/{hash}.bin`."""

    group: int = 0

    def folder(self, name: str) -> str:
        return f"{self.directory}/{name[:3]}/{name[3:5]}_g{self.group}"

    def folders(self) -> Iterator[str]:
        for above in _directories(self.directory):
            yield from (path for path in _directories(above) if path.endswith(f"_g{self.group}"))


class VllmFileStorage(DirectoryStorage):
    """Pages that vLLM wrote or will read. Its directory may appear after us: until then probes say unavailable."""

    kind = "vllm-file"

    def _folders(self) -> Iterator[str]:
        for model in _directories(self.root):
            for above in _directories(model):
                yield from _directories(above)

    def _shelf(self, model: ModelLayout, component_index: int) -> Shelf:
        component = model.components[component_index]
        if model.vllm is None or not model.vllm.folder:
            raise ValueError(f"model {model.name!r} has no folder of vLLM's")
        if component.shards != 1:
            raise ValueError(f"{component.name}: {component.shards} shards configured, but vLLM has 1 file a page")
        return VllmShelf(
            directory=f"{self.root}/{model.vllm.folder}",
            root=self.root,
            fans_out=True,
            endings=(".bin",),
            payload_bytes=component.bytes,
            group=component_index,
        )


def _directories(path: str) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        return sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    return []
