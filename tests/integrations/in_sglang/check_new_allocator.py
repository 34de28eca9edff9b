"""SGLang 0.5.23: pages in host memory of its shared-memory allocator."""

import os
from pathlib import Path

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host.common import ShmHostTensorAllocator

from integrations.in_sglang.host_pools import kv_page_bytes, make_kv_pool
from integrations.in_sglang.stage import hashes_of, make_backend, set_up, slots_of
from support.running import running

KEYS = hashes_of(list(range(8 * 16)))


def test_pages_come_into_memory_that_others_can_map(tmp_path: Path) -> None:
    allocator = ShmHostTensorAllocator()
    source, target = make_kv_pool("page_first", 8), make_kv_pool("page_first", 8, allocator)
    with running(set_up(tmp_path, kv_page_bytes())):
        writer, reader = make_backend(tmp_path), make_backend(tmp_path, allocator="shm")
        for backend, pool in ((writer, source), (reader, target)):
            backend.register_mem_pool_host(pool)
            backend.register_mem_host_pool_v2(pool, PoolName.KV)
        places = list(range(8))
        assert writer.batch_set_v1(KEYS, slots_of(places)) == [True] * 8
        assert reader.batch_get_v1(KEYS, slots_of(places)) == [True] * 8
        # What the descriptor shows is what SGLang has.
        whole = source.kv_buffer.contiguous().view(torch.uint8).numpy().tobytes()
        assert os.pread(allocator.fd, len(whole), 0) == whole
        assert reader.batch_set_v1(KEYS, slots_of(places)) == [True] * 8
        for backend in (writer, reader):
            backend.close()
