"""SGLang's own host pools without device pools: the methods that storage backends call are the real ones."""

from typing import Any

import torch

from integrations.in_sglang.loading import VERSION

if VERSION == "0.5.13":
    from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
else:
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

__all__ = ["LAYOUTS", "StatePool", "kv_page_bytes", "make_kv_pool"]

LAYOUTS = ("layer_first", "page_first", "page_first_direct")
_LAYERS, _HEADS, _WIDTH, _PAGE = 3, 2, 32, 16


def kv_page_bytes() -> int:
    return 2 * _LAYERS * _PAGE * _HEADS * _WIDTH * 2


def make_kv_pool(layout: str, pages: int, allocator: Any = None) -> Any:
    """Return a key and value pool of SGLang's, of so many pages of 16 tokens, filled with noise.

    Its memory is Python's, or comes from one of SGLang's allocators.
    """
    pool = MHATokenToKVPoolHost.__new__(MHATokenToKVPoolHost)
    size = pages * _PAGE
    shape = {
        "layer_first": (2, _LAYERS, size, _HEADS, _WIDTH),
        "page_first": (2, size, _LAYERS, _HEADS, _WIDTH),
        "page_first_direct": (2, pages, _LAYERS, _PAGE, _HEADS, _WIDTH),
    }[layout]
    buffer = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)
    if allocator is not None:
        memory = allocator.allocate(shape, torch.bfloat16, "cpu")
        buffer = memory.copy_(buffer)
        pool.allocator = allocator  # as SGLang's constructor does
    fields = {"layout": layout, "page_size": _PAGE, "size": size, "page_num": pages, "layer_num": _LAYERS}
    shape_fields = {"head_num": _HEADS, "head_dim": _WIDTH, "dtype": torch.bfloat16, "kv_buffer": buffer}
    vars(pool).update(fields, **shape_fields, pin_memory=False, device="cpu", dcp_size=1)
    # SGLang counts what is free in tokens.
    pool.available_size = lambda: size
    return pool


class StatePool:
    """A pool of states with one slot a page that names no runs of bytes, as SGLang's does with side states."""

    page_size = 1

    def __init__(self, slots: int, state_bytes: int) -> None:
        self.states = torch.randint(0, 256, (slots, state_bytes), dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        raise NotImplementedError

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.states[0])

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.states[index]

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.states[index] = data_page
