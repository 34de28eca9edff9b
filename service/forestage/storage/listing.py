"""What lies in an L3, page by page: for looking after it, not for serving.

Law: a page is listed once, if at least one of its shards is there; what lies under no name of the model is not listed.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from forestage.core.errors import StorageUnavailableError
from forestage.core.layout import ModelLayout
from forestage.storage.base import Storage
from forestage.storage.directory import DirectoryStorage
from forestage.storage.redis import RedisStorage
from forestage.storage.shelf import Place, place_of, places_of, scan_beneath

__all__ = ["Found", "StoredPage", "collect_pages", "list_pages"]

# (component index, key, shard, stored bytes); the bytes are -1 for what is no value at all.
Found = tuple[int, bytes, int, int]


@dataclass(frozen=True, slots=True)
class StoredPage:
    """One page of one component, as far as names and sizes tell; whether its content is right, only a read tells.

    `shard_bytes[s]` is the stored size of shard s (payload and what the storage adds), None where it is not there;
    `value_bytes` is what it should be.
    """

    component_index: int
    key: bytes
    shard_bytes: tuple[int | None, ...]
    value_bytes: int

    @property
    def missing(self) -> tuple[int, ...]:
        """The shards that are not there."""
        return tuple(shard for shard, size in enumerate(self.shard_bytes) if size is None)

    @property
    def odd(self) -> tuple[int, ...]:
        """The shards that are there in another size than theirs."""
        return tuple(shard for shard, size in enumerate(self.shard_bytes) if size not in {None, self.value_bytes})

    @property
    def is_whole(self) -> bool:
        return not self.missing and not self.odd

    @property
    def stored_bytes(self) -> int:
        return sum(max(0, size or 0) for size in self.shard_bytes)


async def list_pages(storage: Storage, model: ModelLayout) -> list[StoredPage]:
    """Return every page of a model that is there, whole or not, by component and key; takes a look at every name.

    Raises StorageUnavailableError when the storage cannot be asked, OSError when a directory cannot be read.
    """
    if isinstance(storage, DirectoryStorage):
        return await asyncio.to_thread(_list_files, storage, model)
    if isinstance(storage, RedisStorage):
        return await asyncio.to_thread(_list_redis, storage, model)
    raise StorageUnavailableError(f"storage {storage.kind} cannot be listed")


def collect_pages(model: ModelLayout, found: Iterable[Found], value_bytes: tuple[int, ...]) -> list[StoredPage]:
    """Put shards together to pages; `value_bytes` is by component."""
    sizes: dict[tuple[int, bytes], list[int | None]] = {}
    for component_index, key, shard, size in found:
        shards = sizes.setdefault((component_index, key), [None] * model.components[component_index].shards)
        shards[shard] = size
    return [StoredPage(index, key, tuple(sizes[index, key]), value_bytes[index]) for index, key in sorted(sizes)]


def _list_files(storage: DirectoryStorage, model: ModelLayout) -> list[StoredPage]:
    storage.require_root()
    shelves = storage.shelves(model)
    found = (one for folder, places in places_of(shelves).items() for one in _scan(storage.root, folder, places))
    return collect_pages(model, found, tuple(shelf.file_bytes for shelf in shelves))


def _list_redis(storage: RedisStorage, model: ModelLayout) -> list[StoredPage]:
    value_bytes = tuple(component.bytes + storage.trailer_bytes for component in model.components)
    return collect_pages(model, storage.iter_values(model), value_bytes)


def _scan(root: str, folder: str, places: Mapping[tuple[str, str], Place]) -> Iterator[Found]:
    with scan_beneath(root, folder) as entries:
        for entry in entries:
            page = place_of(entry.name, places)
            if page is None:
                continue
            (component_index, shard), key = page
            try:
                size = entry.stat(follow_symlinks=False).st_size if entry.is_file(follow_symlinks=False) else -1
            except FileNotFoundError:
                continue  # removed while we looked
            yield component_index, key, shard, size
