"""SGLang 0.5.13: what its hybrid controller does of a prefetch on the query and I/O threads, through the adapter."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController, PrefetchOperation
from sglang.srt.mem_cache.utils import get_hash_str

from integrations.in_sglang.host_pools import StatePool, kv_page_bytes, make_kv_pool
from integrations.in_sglang.stage import file_backend, hashes_of, make_backend, set_up, slots_of
from support.running import running

TOKENS = list(range(160))
HASHES = hashes_of(TOKENS)
STATE_BYTES = 1000


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def make_controller(backend: Any) -> Any:
    """Return SGLang's hybrid controller with what its query and transfer need, and no device or threads."""
    controller = HybridCacheController.__new__(HybridCacheController)
    vars(controller).update(storage_backend=backend, page_size=16, get_hash_str=get_hash_str, has_draft=False)
    controller.page_get_func = controller._page_get_zero_copy
    return controller


@pytest.mark.parametrize(
    ("free", "states_at", "loaded"),
    [
        (160, (64, 128), 128),
        (96, (64, 128), 64),  # SGLang 0.5.13 cuts what it asks for, so that the boundary snaps by itself
        (96, (64, 96, 128), 96),
        (96, (128,), 0),
    ],
)
@pytest.mark.parametrize("through", ["forestage", "file"])
def test_query_and_transfer(
    stack: ExitStack, tmp_path: Path, free: int, states_at: tuple[int, ...], loaded: int, through: str
) -> None:
    source, target = make_kv_pool("layer_first", 10), make_kv_pool("layer_first", 10)
    states, restored = StatePool(8, STATE_BYTES), StatePool(4, STATE_BYTES)
    stack.enter_context(running(set_up(tmp_path, kv_page_bytes(), STATE_BYTES)))
    files = file_backend(tmp_path)
    assert files.batch_set(HASHES, [source.get_data_page(page * 16, flat=True) for page in range(10)])
    for tokens in states_at:
        assert files.set(f"{HASHES[tokens // 16 - 1]}.mamba", states.states[tokens // 32])
    backend: Any = files if through == "file" else make_backend(tmp_path)
    backend.register_mem_pool_host(target)
    backend.register_mem_host_pool_v2(restored, PoolName.MAMBA)
    controller = make_controller(backend)
    if through == "file":
        controller.page_get_func = controller._generic_page_get
        controller.mem_pool_host = target
    else:
        stack.callback(backend.close)

    transfer = PoolTransfer(PoolName.MAMBA, torch.tensor([2]), None, HASHES[-1:], PoolHitPolicy.TRAILING_PAGES)
    operation = PrefetchOperation("r", slots_of(list(range(10))), TOKENS[:free], pool_transfers=[transfer])
    operation.hash_value, found = controller._storage_hit_query(operation)
    assert found == loaded
    if not loaded:
        return
    operation.host_indices = operation.host_indices[:found]
    controller._page_transfer(operation)
    assert (operation.completed_tokens, operation.pool_transfers_done) == (loaded, True)
    assert operation.pool_storage_result.extra_pool_hit_pages["mamba"] == 1
    assert torch.equal(restored.states[2], states.states[loaded // 32])
    for page in range(loaded // 16):
        read, written = (pool.get_data_page(page * 16, flat=True).view(torch.int16) for pool in (target, source))
        assert torch.equal(read, written)


def test_a_backup_reaches_the_service(stack: ExitStack, tmp_path: Path) -> None:
    source, states = make_kv_pool("page_first", 10), StatePool(4, STATE_BYTES)
    stack.enter_context(running(set_up(tmp_path, kv_page_bytes(), STATE_BYTES)))
    backend = make_backend(tmp_path)
    stack.callback(backend.close)
    backend.register_mem_pool_host(source)
    backend.register_mem_host_pool_v2(states, PoolName.MAMBA)
    controller = make_controller(backend)
    controller.page_set_func = controller._page_set_zero_copy
    transfer = PoolTransfer(PoolName.MAMBA, torch.tensor([1]), None, HASHES[3:4], PoolHitPolicy.TRAILING_PAGES)
    operation = SimpleNamespace(
        pool_transfers=[transfer],
        hash_value=HASHES[:4],
        host_indices=slots_of(list(range(4))),
        prefix_keys=None,
        completed_tokens=0,
        pool_storage_result=SimpleNamespace(update_extra_pool_hit_pages=lambda results: None),
    )
    controller._page_backup(operation)
    assert operation.completed_tokens == 64
    assert backend.batch_exists_v2(HASHES, [transfer]).kv_hit_pages == 4
