"""Pages in SGLang's host memory, as the runs of bytes that each consists of.

Law: the runs of a page, in order, are the bytes of its flat page, as SGLang's file backend stores it: a page that was
written by one is read by the other.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from forestage_client._memory import address_of

if TYPE_CHECKING:
    import torch

__all__ = ["BytesPage", "FlatPage", "HostPage", "RunsPage", "pages_of", "tensor_page"]


class HostPage(Protocol):
    """Memory of `num_bytes` bytes that holds one page, or is to hold one."""

    @property
    def num_bytes(self) -> int: ...

    def fill(self, source: int) -> None:
        """Copy the page from the address `source`, without the GIL."""

    def drain(self, target: int) -> None:
        """Copy the page to the address `target`, without the GIL."""


@dataclass(frozen=True, slots=True)
class RunsPage:
    """A page that lies in runs of (address, bytes). `owner` keeps that memory alive."""

    runs: tuple[tuple[int, int], ...]
    num_bytes: int
    owner: object

    def fill(self, source: int) -> None:
        for address, size in self.runs:
            ctypes.memmove(address, source, size)
            source += size

    def drain(self, target: int) -> None:
        for address, size in self.runs:
            ctypes.memmove(target, address, size)
            target += size


@dataclass(frozen=True, slots=True)
class FlatPage:
    """A page of a pool that does not say where its bytes lie: it takes and gives them as a flat tensor."""

    pool: Any
    index: int
    num_bytes: int

    def fill(self, source: int) -> None:
        flat = self.pool.get_dummy_flat_data_page()
        ctypes.memmove(flat.data_ptr(), source, self.num_bytes)
        self.pool.set_from_flat_data_page(self.index, flat)

    def drain(self, target: int) -> None:
        flat = self.pool.get_data_page(self.index, flat=True).contiguous()
        ctypes.memmove(target, flat.data_ptr(), self.num_bytes)


@dataclass(frozen=True, slots=True)
class BytesPage:
    """A page in memory of Python's own."""

    data: bytearray

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    def address(self) -> int:
        """Return where the bytes are, as long as `data` is neither resized nor dropped."""
        return address_of(memoryview(self.data))

    def fill(self, source: int) -> None:
        ctypes.memmove(self.address(), source, len(self.data))

    def drain(self, target: int) -> None:
        ctypes.memmove(target, self.address(), len(self.data))


def tensor_page(tensor: "torch.Tensor") -> RunsPage:
    """Return the page that a flat tensor in host memory is. Raises ValueError when it is not contiguous there."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("a page must be a contiguous tensor in host memory")
    size = tensor.numel() * tensor.element_size()
    return RunsPage(((tensor.data_ptr(), size),), size, tensor)


def pages_of(pool: Any, host_indices: "torch.Tensor | None", count: int) -> Sequence[HostPage]:
    """Return `count` pages of one of SGLang's host pools, by the slots of their tokens.

    Raises ValueError when `host_indices` does not name `count` pages.
    """
    # Where one pool stands for several, its indices are those of the anchor.
    anchor = getattr(pool, "anchor_entry", None)
    pool = pool if anchor is None else anchor.host_pool
    page_tokens = getattr(pool, "page_size", 1) or 1
    given = 0 if host_indices is None else host_indices.numel()
    if host_indices is None or given != count * page_tokens:
        raise ValueError(f"{count} pages have {count * page_tokens} slots of SGLang's host pool, not {given}")
    if not count:
        return ()
    runs_of = getattr(pool, "get_page_buffer_meta", None)
    try:
        addresses, sizes = ((), ()) if runs_of is None else runs_of(host_indices)
    except (NotImplementedError, ValueError):
        # A layout in which a page does not lie in runs, or a pool with more to it than these.
        addresses, sizes = (), ()
    if not addresses:
        flat = pool.get_dummy_flat_data_page()
        size = flat.numel() * flat.element_size()
        return [FlatPage(pool, int(host_indices[page * page_tokens]), size) for page in range(count)]
    per_page = len(addresses) // count
    # SGLang lists keys and values of each layer in turn; a flat page has all keys, then all values, as memory has.
    in_memory_order = getattr(pool, "layout", "") == "layer_first"
    pages = []
    for at in range(0, len(addresses), per_page):
        runs = list(zip(addresses[at : at + per_page], sizes[at : at + per_page], strict=True))
        if in_memory_order:
            runs.sort()
        pages.append(RunsPage(tuple(runs), sum(size for _, size in runs), pool))
    return pages
