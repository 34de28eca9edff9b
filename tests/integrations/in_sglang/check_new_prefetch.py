"""SGLang 0.5.23: its hybrid cache and controller threads prefetch through the adapter, or from its own file backend."""

import json
import os
import sys
import time
import types
import unittest
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

# The kit that comes with the wheel wants one name of a module that cannot be imported without servers to test.
_kit_support = types.ModuleType("sglang.test.test_utils")
vars(_kit_support)["CustomTestCase"] = unittest.TestCase
sys.modules[_kit_support.__name__] = _kit_support

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: E402
from sglang.srt.mem_cache.pool_host import common  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: E402
from sglang.test.kits.unified_radix_cache import fixtures  # noqa: E402
from sglang.test.kits.unified_radix_cache.config import CacheConfig  # noqa: E402

from integrations.in_sglang.stage import MODEL, extra_config, hashes_of, set_up  # noqa: E402
from support.running import running  # noqa: E402

TOKENS = list(range(1000, 1160))
HASHES = hashes_of(TOKENS, 1)
WAIT_S = 30.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Engine:
    """A hybrid cache of SGLang's with its controller and threads on the CPU: pages of one token, a pool of 513."""

    def __init__(self, stack: ExitStack, backend: str, extra: dict[str, Any]) -> None:
        stack.enter_context(get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1))
        for name in ("_cuda_host_register", "_cuda_host_unregister_ranges"):
            stack.enter_context(mock.patch.object(common, name))
        stack.enter_context(mock.patch.object(fixtures, "get_device", return_value="cpu"))
        self.cache, _, _ = fixtures.build_fixture(CacheConfig(components=(ComponentType.FULL, ComponentType.MAMBA)))
        arguments = ServerArgs(
            model_path="dummy",
            served_model_name=MODEL,
            page_size=1,
            hicache_io_backend="kernel",
            hicache_storage_backend=backend,
            hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": 1, **extra}),
            hicache_storage_prefetch_policy="wait_complete",
            hicache_host_memory_mode="cache",
        )
        arguments._mamba_cache_chunk_size = 64
        set_global_server_args_for_scheduler(arguments)
        self.cache.init_hicache(arguments, self.cache.cache_init_params)
        fixtures.drop_hicache_atexit_pin(self.cache)
        self.controller = self.cache.cache_controller
        stack.callback(self.controller._stop_storage_threads)
        self.pools = self.controller.mem_pool_host
        self.controller.prefetch_capacity_limit = self.pools.size
        for entry in self.pools.entries:
            entry.host_pool.pin_memory = False

    def pool(self, name: str) -> Any:
        return next(entry.host_pool for entry in self.pools.entries if entry.name == name)

    def page_bytes(self, name: str) -> int:
        flat = self.pool(name).get_dummy_flat_data_page()
        return int(flat.numel() * flat.element_size())

    def leave_free(self, tokens: int) -> None:
        """Fill the pool of KV pages with what nobody can evict."""
        assert self.pools.alloc(self.pools.available_size() - tokens) is not None

    def wait_for_service(self) -> None:
        """Wait until the adapter, to which it was away when SGLang started, finds it."""
        deadline = time.monotonic() + WAIT_S
        while not self.controller.storage_backend.exists(HASHES[0]):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def prefetch(self, request: str) -> tuple[int, int]:
        """Prefetch the prompt; return how many tokens of it SGLang loaded, and how many it can then resume from."""
        handle = CacheRequestHandle(request, 0)
        self.cache.prefetch_from_storage(handle, self.cache.root_node_handle(), array("q", TOKENS), None, None)
        deadline = time.monotonic() + WAIT_S
        while True:
            self.cache.check_hicache_events()
            if self.cache.check_prefetch_progress(handle):
                break
            assert time.monotonic() < deadline
            time.sleep(0.005)
        loaded = self.cache.pop_prefetch_loaded_tokens(handle)
        return loaded, fixtures.match_prefix(self.cache, TOKENS).host_hit_length


def fill(home: Path, engine: Engine, states_at: tuple[int, ...]) -> dict[str, bytes]:
    """Write the prompt's pages and some states into SGLang's directory; return them by file name."""
    (home / "l3").mkdir(exist_ok=True)
    suffix = f"_{MODEL.replace('/', '-')}_0_1.bin"
    pages = {f"{key}{suffix}": os.urandom(engine.page_bytes("kv")) for key in HASHES}
    pages |= {f"{HASHES[n - 1]}.mamba{suffix}": os.urandom(engine.page_bytes("mamba")) for n in states_at}
    for name, content in pages.items():
        (home / "l3" / name).write_bytes(content)
    return pages


def restored(engine: Engine, pages: dict[str, bytes], length: int) -> bool:
    """Say whether the pages and the state of a prefix lie in SGLang's pools, byte for byte."""
    group = engine.cache
    node = fixtures.match_prefix(group, TOKENS).last_host_node
    kv, states = [], []
    while node is not None and (value := fixtures.node_host_value(group, node, ComponentType.FULL)) is not None:
        kv.append(value)
        states.append(fixtures.node_host_value(group, node, ComponentType.MAMBA))
        node = fixtures.node_parent(group, node)
    slots = torch.cat(kv[::-1]).tolist()
    assert len(slots) == length
    suffix = f"_{MODEL.replace('/', '-')}_0_1.bin"

    def holds(pool: str, slot: int, name: str) -> bool:
        flat = engine.pool(pool).get_data_page(slot, flat=True).contiguous().view(torch.uint8)
        return bytes(flat.numpy().tobytes()) == pages[name]

    whole = all(holds("kv", slot, f"{key}{suffix}") for slot, key in zip(slots, HASHES, strict=False))
    return whole and holds("mamba", int(states[0][0]), f"{HASHES[length - 1]}.mamba{suffix}")


@pytest.mark.parametrize(
    ("free", "states_at", "usable", "alone"),
    [
        (512, (64, 128), 128, 128),
        (100, (64, 128), 64, 0),  # SGLang cuts what is stored to 100, where no state is
        (96, (64, 96, 128), 96, 96),
        (96, (128,), 0, 0),
        (40, (64,), 0, 0),
    ],
)
@pytest.mark.parametrize("through", ["forestage", "file"])
def test_a_prefix_that_is_cut_is_cut_where_it_can_be_resumed(
    stack: ExitStack, tmp_path: Path, free: int, states_at: tuple[int, ...], usable: int, alone: int, through: str
) -> None:
    if through == "file":
        os.environ.pop("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", None)
        engine = Engine(stack, "file", {"file_storage_path": str(tmp_path / "l3")})
        fill(tmp_path, engine, states_at)
        engine.leave_free(free)
        assert engine.prefetch("r") == (alone, alone)
        return
    engine = Engine(stack, "dynamic", extra_config(tmp_path))
    pages = fill(tmp_path, engine, states_at)
    engine.leave_free(free)
    config = set_up(tmp_path, engine.page_bytes("kv"), engine.page_bytes("mamba"), page_tokens=1)
    with running(config):
        engine.wait_for_service()
        assert engine.prefetch("r") == (usable, usable)
        assert not usable or restored(engine, pages, usable)


def test_room_is_learned_where_it_could_not_be_known(stack: ExitStack, tmp_path: Path) -> None:
    engine = Engine(stack, "dynamic", extra_config(tmp_path))
    pages = fill(tmp_path, engine, (40, 128))
    engine.leave_free(100)
    with running(set_up(tmp_path, engine.page_bytes("kv"), engine.page_bytes("mamba"), page_tokens=1)):
        engine.wait_for_service()
        # 40 tokens are certain, but 128 could be had if SGLang could evict. It cannot, and cuts them to 100.
        assert engine.prefetch("r") == (0, 0)
        assert engine.prefetch("s") == (40, 40)
        assert restored(engine, pages, 40)


def test_a_prefetch_without_the_service_is_a_miss(stack: ExitStack, tmp_path: Path) -> None:
    engine = Engine(stack, "dynamic", extra_config(tmp_path))
    pages = fill(tmp_path, engine, (64, 128))
    assert engine.prefetch("r") == (0, 0)
    config = set_up(tmp_path, engine.page_bytes("kv"), engine.page_bytes("mamba"), page_tokens=1)
    with running(config) as service:
        engine.wait_for_service()
        assert engine.prefetch("s") == (128, 128)
        assert restored(engine, pages, 128)
        service.process.kill()
        service.process.wait(20)
    assert engine.prefetch("t") == (0, 128)
