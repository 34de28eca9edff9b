"""vLLM's tiering manager with our tier, as its own factory makes them, and a service beside it."""

import hashlib
import os
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

__all__ = ["MODEL", "ROW", "Engine", "chain", "content", "extra_config", "offloading_config", "write_config"]

MODEL = "acme/tiny"
BLOCK_TOKENS, BLOCKS = 16, 4
ROW = 16384
WAIT_S = 30.0

_CONFIG = """
[server]
port = 0
uds = "{home}/s"
[pool]
path = "{home}/pool"
bytes = "8MiB"
pin = "none"
[writes]
max_dirty_fraction = 1.0
[storage]
{storage}
[[models]]
name = "{model}"
page_tokens = 64
{more}
[[models.components]]
name = "kv"
bytes = {row}
slots = {slots}
"""
_STATE = """
[[models.components]]
name = "mamba"
bytes = {row}
covers = "tail"
window = 1
slots = 8
"""


def write_config(home: Path, *, slots: int = 64, state: bool = False, storage: str = "", model: str = "") -> Path:
    """Write the configuration of a service; `storage` and `model` are lines for those tables."""
    storage = storage or f'kind = "file"\n[storage.file]\nroot = "{home}/l3"'
    text = _CONFIG + (_STATE if state else "")
    (home / "forestage.toml").write_text(
        text.format(home=home, model=MODEL, row=ROW, slots=slots, storage=storage, more=model)
    )
    return home / "forestage.toml"


def chain(count: int, name: str = "a") -> list[bytes]:
    """Block hashes of a prompt, one a chunk."""
    return [hashlib.sha256(f"{name}|{page}".encode()).digest() for page in range(count)]


def content(key: bytes, group: int = 0) -> bytes:
    """Return the bytes of a chunk."""
    return (hashlib.sha256(key + bytes([group])).digest() * (ROW // 32))[:ROW]


def extra_config(home: Path, rows: int, **more: Any) -> dict[str, Any]:
    """Return the `kv_connector_extra_config` of a user's."""
    tier = {
        "type": "ForestageTier",
        "module_path": "forestage_client.integrations.vllm",
        "pool_path": f"{home}/pool",
        "url": f"unix:{home}/s",
        **more,
    }
    return {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": rows * ROW, "secondary_tiers": [tier]}


def offloading_config(extra: dict[str, Any], groups: int = 1, parallel: dict[str, Any] | None = None) -> Any:
    """Return what vLLM's connector hands to the spec."""
    made = [
        OffloadingGroupConfig(BLOCK_TOKENS, (f"layers.{group}",), group, 1 if group else None)
        for group in range(groups)
    ]
    ranks = {"rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    return OffloadingConfig(
        groups=tuple(made),
        worker_kv_bytes_per_block=ROW // BLOCKS,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id=f"forestage-test-{os.getpid()}-{uuid.uuid4().hex[:8]}",
        model=OffloadingModelConfig(MODEL, "bfloat16"),
        cache=OffloadingCacheConfig(BLOCK_TOKENS, BLOCKS),
        parallel=OffloadingParallelConfig(
            **{**ranks, **(parallel or {})},
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )


class Engine:
    """The scheduler's side of an engine: it steps, asks for chunks, and puts chunks as its workers would."""

    def __init__(self, extra: dict[str, Any], groups: int = 1) -> None:
        spec_class = OffloadingSpecFactory.get_spec_cls(extra)
        self.spec = spec_class(offloading_config(extra, groups))
        self.manager = self.spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self.rows = self.manager.primary_tier.get_kv_memoryview().cast("B")
        self._requests = 0

    def close(self) -> None:
        self.rows.release()
        self.manager.shutdown()

    def request(self) -> ReqContext:
        self._requests += 1
        context = ReqContext(f"r{self._requests}")
        with self.manager.lock:
            self.manager.on_new_request(context)
        return context

    def finish(self, context: ReqContext) -> None:
        with self.manager.lock:
            self.manager.on_request_finished(context)

    def step(self) -> None:
        with self.manager.lock:
            self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def look(self, hashes: Sequence[bytes], context: ReqContext, group: int = 0) -> list[LookupResult]:
        with self.manager.lock:
            return [self.manager.lookup(make_offload_key(page, group), context) for page in hashes]

    def settle(self, hashes: Sequence[bytes], context: ReqContext, group: int = 0) -> list[LookupResult]:
        """Look and step until nothing is pending, as the scheduler does."""
        deadline = time.monotonic() + WAIT_S
        while True:
            found = self.look(hashes, context, group)
            self.step()
            if not {LookupResult.HIT_PENDING, LookupResult.RETRY} & set(found):
                return found
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def hits(self, hashes: Sequence[bytes], group: int = 0) -> int:
        """Return how long a prefix a new request finds in the end."""
        context = self.request()
        found = self.settle(hashes, context, group)
        self.finish(context)
        return next((page for page, result in enumerate(found) if result is not LookupResult.HIT), len(found))

    def row_of(self, page: bytes, group: int = 0) -> bytes:
        """Return what a worker would load."""
        context = self.request()
        keys = [make_offload_key(page, group)]
        with self.manager.lock:
            spec = self.manager.prepare_load(keys, context)
            (row,) = spec.chunk_ids.tolist()
            data = bytes(self.rows[row * ROW : (row + 1) * ROW])
            self.manager.complete_load(keys, context)
        self.finish(context)
        return data

    def store(self, pages: Iterable[tuple[bytes, int]]) -> None:
        """Put chunks into vLLM's host memory as its workers do after a prefill."""
        context = self.request()
        keys = [make_offload_key(page, group) for page, group in pages]
        with self.manager.lock:
            prepared = self.manager.prepare_store(keys, context)
            assert prepared is not None
            for key, row in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids.tolist(), strict=True):
                self.rows[row * ROW : (row + 1) * ROW] = content(key[:-4], key[-1])
            self.manager.complete_store(prepared.keys_to_store, context)
        self.finish(context)

    def work_off(self) -> None:
        """Step until no transfer is under way."""
        deadline = time.monotonic() + WAIT_S
        while self.manager.has_pending_work():
            self.step()
            assert time.monotonic() < deadline
            time.sleep(0.001)
