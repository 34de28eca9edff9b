"""SGLang 0.5.23: pages in host memory of its shared-memory allocator, copied there or filled by the service."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.common import ShmHostTensorAllocator

from forestage_client.integrations._host_pages import RunsPage
from integrations.in_sglang.host_pools import LAYOUTS, StatePool, kv_page_bytes, make_kv_pool
from integrations.in_sglang.stage import hashes_of, make_backend, set_up, slots_of
from support.running import running

KEYS = hashes_of(list(range(8 * 16)))
PLACES = list(range(8))


class Copies:
    """Counts the pages that the engine's process copies out of the shared pool."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pages = 0
        fill = RunsPage.fill

        def counted(page: RunsPage, source: int) -> None:
            self.pages += 1
            fill(page, source)

        monkeypatch.setattr(RunsPage, "fill", counted)


def _register(backend: Any, pool: Any) -> None:
    backend.register_mem_pool_host(pool)
    backend.register_mem_host_pool_v2(pool, PoolName.KV)


def _bytes(pool: Any) -> bytes:
    return bytes(pool.kv_buffer.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fills", [True, False], ids=["filled", "copied"])
def test_pages_come_into_memory_that_others_can_map(
    tmp_path: Path, fills: bool, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator, copies = ShmHostTensorAllocator(), Copies(monkeypatch)
    source, target = make_kv_pool(layout, 8), make_kv_pool(layout, 8, allocator)
    with running(set_up(tmp_path, kv_page_bytes(), fills=fills)):
        writer, reader = make_backend(tmp_path), make_backend(tmp_path, allocator="shm")
        _register(writer, source)
        _register(reader, target)
        assert writer.batch_set_v1(KEYS, slots_of(PLACES)) == [True] * 8
        assert reader.batch_get_v1(KEYS, slots_of(PLACES)) == [True] * 8
        assert copies.pages == (0 if fills else 8)
        # What the descriptor shows is what SGLang has.
        whole = _bytes(source)
        assert _bytes(target) == whole
        assert os.pread(allocator.fd, len(whole), 0) == whole
        # A page that is not stored, in the middle of the pool: those behind it stay as they are.
        strange = hashes_of(list(range(100, 100 + 16)))
        assert reader.batch_get_v1([KEYS[0], *strange], slots_of([5, 6])) == [True, False]
        for place, page in enumerate([0, 1, 2, 3, 4, 0, 6, 7]):
            there, meant = target.get_data_page(place * 16), source.get_data_page(page * 16)
            assert torch.equal(there.contiguous().view(torch.int16), meant.contiguous().view(torch.int16))
        assert reader.batch_set_v1(KEYS, slots_of(PLACES)) == [True] * 8
        for backend in (writer, reader):
            backend.close()


def test_a_service_that_comes_back_fills_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(monkeypatch)
    source, target = make_kv_pool("page_first", 8), make_kv_pool("page_first", 8, ShmHostTensorAllocator())
    config = set_up(tmp_path, kv_page_bytes(), fills=True)
    writer, reader = make_backend(tmp_path), make_backend(tmp_path, allocator="shm")
    _register(writer, source)
    _register(reader, target)
    with running(config) as service:
        assert _until_all(lambda: writer.batch_set_v1(KEYS, slots_of(PLACES)))
        assert _until_all(lambda: reader.batch_get_v1(KEYS, slots_of(PLACES)))
        service.stop()
    assert reader.batch_get_v1(KEYS, slots_of(PLACES)) == [False] * 8
    target.kv_buffer.zero_()
    with running(config):

        def filled() -> list[bool]:
            copies.pages = 0
            done: list[bool] = reader.batch_get_v1(KEYS, slots_of(PLACES))
            return [ok and copies.pages == 0 for ok in done]

        assert _until_all(filled)
        assert _bytes(target) == _bytes(source)
    for backend in (writer, reader):
        backend.close()


def _until_all(ask: Any, deadline_s: float = 30.0) -> bool:
    ends = time.monotonic() + deadline_s
    while not all(ask()):
        if time.monotonic() > ends:
            return False
        time.sleep(0.05)
    return True


def test_a_hybrid_model_is_filled_where_its_memory_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(monkeypatch)
    source, target = make_kv_pool("page_first", 8), make_kv_pool("page_first", 8, ShmHostTensorAllocator())
    states, restored = StatePool(8, 4096), StatePool(8, 4096)
    with running(set_up(tmp_path, kv_page_bytes(), 4096, fills=True)):
        writer, reader = make_backend(tmp_path), make_backend(tmp_path, allocator="shm")
        for backend, pool, side in ((writer, source, states), (reader, target, restored)):
            _register(backend, pool)
            backend.register_mem_host_pool_v2(side, PoolName.MAMBA)
        one = torch.tensor([3])
        put = PoolTransfer(name=PoolName.MAMBA, host_indices=one, keys=[KEYS[7]])
        assert writer.batch_set_v2([put])[PoolName.MAMBA] == [True]
        assert writer.batch_set_v1(KEYS, slots_of(PLACES)) == [True] * 8
        assert reader.batch_get_v1(KEYS, slots_of(PLACES)) == [True] * 8
        get = PoolTransfer(name=PoolName.MAMBA, host_indices=one, keys=[KEYS[7]])
        assert reader.batch_get_v2([get])[PoolName.MAMBA] == [True]
        assert copies.pages == 0
        assert _bytes(target) == _bytes(source)
        assert torch.equal(restored.states[3], states.states[3])
        for backend in (writer, reader):
            backend.close()
