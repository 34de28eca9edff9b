"""L3 in a directory, in our own value format: `root/fingerprint/component/xx/key-shard.page`."""

import contextlib
import os
from collections.abc import Iterator
from functools import partial

from forestage.core.errors import StartError
from forestage.core.layout import ModelLayout
from forestage.storage.direct import DirectShelf
from forestage.storage.directory import DirectoryStorage
from forestage.storage.envelope import seed_of
from forestage.storage.shelf import Shelf

__all__ = ["FileStorage"]


class FileStorage(DirectoryStorage):
    """Pages as files whose trailer vouches for name, size and content."""

    kind = "file"

    def __init__(self, root: str | os.PathLike[str], *, direct: bool = False, readers: int = 0) -> None:
        """Touch nothing yet.

        Args:
            root: made by `open` or by the first write.
            direct: read past the page cache where the file system can do that.
            readers: threads that read; 0 chooses for this machine.
        """
        super().__init__(root, readers=readers)
        self._direct = direct

    async def open(self) -> None:
        """Make the root, and begin to remove what killed writers left. Raises StartError when there can be no root."""
        job = self._probers.submit(partial(os.makedirs, self.root, exist_ok=True))
        try:
            await job.wait()
        except OSError as error:
            raise StartError(f"storage.file.root: cannot make {self.root}: {error.strerror}") from error
        finally:
            self._probers.replace_stalled(job)
        await super().open()

    def _folders(self) -> Iterator[str]:
        for model in _directories(self.root):
            for component in _directories(model):
                yield from _directories(component)

    def _shelf(self, model: ModelLayout, component_index: int) -> Shelf:
        component = model.components[component_index]
        if component.name in {"", ".", ".."} or "/" in component.name or "\0" in component.name:
            raise ValueError(f"{component.name!r} cannot name a directory")
        shards = range(component.shards)
        kind = DirectShelf if self._direct else Shelf
        return kind(
            directory=f"{self.root}/{model.fingerprint}/{component.name}",
            root=self.root,
            fans_out=True,
            endings=tuple(f"-{shard}.page" for shard in shards),
            payload_bytes=component.bytes,
            seeds=tuple(seed_of(model.fingerprint, component.name, shard) for shard in shards),
        )


def _directories(path: str) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []
