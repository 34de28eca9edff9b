"""Changes of the pool as KV events, the way vLLM and SGLang publish them: blocks stored, blocks removed, all cleared.

Law: between two `clear`s a block of a group is told to be stored and removed by turns, beginning with stored, and what
is told to be stored and not removed is what is resident. In the array form, which has no groups, a block is there while
every component that each page needs has it.

    array  ["BlockStored", hashes, parent, token_ids, block_size, lora_id, medium, lora_name]
           ["BlockRemoved", hashes, medium]    ["AllBlocksCleared"]
    map    {"type": "BlockStored", "block_hashes": hashes, ...}, and `group_idx`, the number of the component

Of a block nothing but its hash is known here, so parent and adapter are nil and there are no tokens, as in the events
that vLLM's own offloading sends where it knows no more.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

import msgpack

from forestage.core.layout import ModelLayout
from forestage.core.residency import ResidencyEvent

__all__ = ["MEDIUM", "BlockChange", "Blocks", "HashForm", "KvForm", "encode_batch", "write_event"]

#: Where the blocks are, in the words of KV events: in host memory.
MEDIUM = "CPU"


class KvForm(StrEnum):
    """How an event is written."""

    ARRAY = "array"  # what every reader takes: vLLM before 0.33, SGLang, AIBrix, llm-d
    MAP = "map"  # vLLM 0.33


class HashForm(StrEnum):
    """How a page key is written as a block hash, so that it equals the engine's."""

    BYTES = "bytes"  # the whole key
    VLLM = "vllm"  # its last 8 bytes, as an unsigned number
    SGLANG = "sglang"  # its first 8 bytes, as a signed number


_HASHES: dict[HashForm, Callable[[bytes], int | bytes]] = {
    HashForm.BYTES: bytes,
    HashForm.VLLM: lambda key: int.from_bytes(key[-8:], "big"),
    HashForm.SGLANG: lambda key: int.from_bytes(key[:8], "big", signed=True),
}


class BlockChange(NamedTuple):
    """Blocks that came or went together. `group` is the number of a component, None where a block is a whole page."""

    stored: bool
    group: int | None
    keys: list[bytes]


class Blocks:
    """What has been told of one model."""

    def __init__(self, layout: ModelLayout, form: KvForm, hash_form: HashForm) -> None:
        self.layout = layout
        self._form = form
        self._hash = _HASHES[hash_form]
        self._groups = {component.name: index for index, component in enumerate(layout.components)}
        self._every_page = {layout.components[index].name for index in layout.every_page}
        self._parts: dict[bytes, int] = {}  # how many components have a page, where several must

    def clear(self) -> None:
        """Begin anew: nothing has been told."""
        self._parts.clear()

    def take(self, events: Iterable[ResidencyEvent]) -> Iterator[BlockChange]:
        """Yield what events of this model, in their order, are as changes of blocks."""
        for (stored, component), run in groupby(events, key=lambda event: (event.stored, event.place.component)):
            keys = [event.key for event in run]
            if self._form is KvForm.MAP:
                yield BlockChange(stored, self._groups[component], keys)
            elif component in self._every_page:
                whole = [key for key in keys if self._changes_page(key, stored)]
                if whole:
                    yield BlockChange(stored, None, whole)

    def write(self, change: BlockChange) -> object:
        """Return a change as an event that can be packed."""
        hashes = [self._hash(key) for key in change.keys]
        return write_event(self._form, hashes, change.stored, self.layout.page_tokens, change.group)

    def _changes_page(self, key: bytes, stored: bool) -> bool:
        """Take note that one component has a page now, or has it no more; say whether the page is there by that."""
        needed = len(self._every_page)
        if needed == 1:
            return True
        had = self._parts.get(key, 0)
        has = self._parts[key] = had + (1 if stored else -1)
        if not has:
            del self._parts[key]
        return needed in (had, has)

    def check_integrity(self) -> None:
        """Raise if some page is said to be in no component, or in more than there are."""
        if any(not 0 < parts <= len(self._every_page) for parts in self._parts.values()):
            raise RuntimeError(f"pages of {self.layout.name} in impossible numbers of components")


def write_event(
    form: KvForm, hashes: Sequence[int | bytes], stored: bool | None, block_size: int = 0, group: int | None = None
) -> object:
    """Return an event: blocks stored, blocks removed, or with `stored` None all blocks cleared."""
    if form is KvForm.ARRAY:
        if stored is None:
            return ["AllBlocksCleared"]
        if stored:
            return ["BlockStored", hashes, None, [], block_size, None, MEDIUM, None]
        return ["BlockRemoved", hashes, MEDIUM]
    if stored is None:
        return {"type": "AllBlocksCleared"}
    where = {"medium": MEDIUM} if group is None else {"medium": MEDIUM, "group_idx": group}
    if not stored:
        return {"type": "BlockRemoved", "block_hashes": hashes, **where}
    unknown: dict[str, object] = {"parent_block_hash": None, "token_ids": [], "lora_id": None, "lora_name": None}
    return {"type": "BlockStored", "block_hashes": hashes, "block_size": block_size, **unknown, **where}


def encode_batch(timestamp: float, events: Sequence[object], data_parallel_rank: int) -> bytes:
    """Pack events into the payload of one message; `timestamp` is in seconds since 1970."""
    packed: bytes = msgpack.packb([timestamp, events, data_parallel_rank])
    return packed
