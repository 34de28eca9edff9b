"""Forestage as a secondary tier of vLLM's tiering offload: pages that the service has brought are hits at once.

Law: each job that vLLM submits is answered once, success or not, and after `drain_jobs` nothing touches its memory.
Only stores ask the service, in a thread of their own; lookups and loads go by the shared pool alone.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from forestage_client._errors import ForestageError
from forestage_client._memory import address_of
from forestage_client.client import Client
from forestage_client.integrations._outages import Away, Mismatch
from forestage_client.integrations._pool_rows import Attachment, PoolRows, RowGroup, RowModel
from forestage_client.integrations._quiet_log import QuietLog
from forestage_client.integrations._row_writes import RowToWrite, RowWriter
from forestage_client.pool_view import Stale

__all__ = ["ForestageTier"]

_log = QuietLog(logging.getLogger(__name__))


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How many chunks came across; of loads also which."""

    count: int
    keys: tuple[Any, ...] = ()


class ForestageTier(SecondaryTierManager):  # type: ignore[misc]
    """The pages of one model in the pool on this machine. vLLM calls it under its manager's lock."""

    medium: ClassVar[Any] = Medium.CPU

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        model: str = "",
        pool_path: str = "/dev/shm/forestage/pool",
        components: Sequence[str] | None = None,
        url: str = "http://127.0.0.1:8470",
        token_file: str = "",
        tenant: str | None = None,
        store: bool = True,
        load_threads: int = 2,
        timeout_ms: int = 1000,
        locality: str = "LOCAL",
    ) -> None:
        """Take the keys of the tier's JSON, and attach the pool if it is there; a service that is away is no error.

        Args:
            offloading_spec: vLLM's.
            primary_kv_view: vLLM's host memory, one row a chunk.
            tier_type: what vLLM calls the tier.
            backpressure_detector: vLLM's, which holds back stores that take too long.
            model: the name of the model in the service's configuration; empty: as vLLM calls it.
            pool_path: `pool.path` of the service, as this process sees it.
            components: the component of each KV cache group, in order; None: the model's.
            url: where the service listens, for stores.
            token_file: holds the token that the service asks for; empty: none.
            tenant: on whose account pages are written.
            store: whether what vLLM computes goes into the pool.
            load_threads: how many copies run at once.
            timeout_ms: how long a call of the service may take.
            locality: "LOCAL" or "REMOTE", for vLLM's tier filters.

        Raises ValueError for what cannot be meant, OSError when the token cannot be read.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality)
        groups = tuple(
            RowGroup(group.tokens_per_block * offloading_spec.blocks_per_chunk, group.sliding_window_size_in_chunks)
            for group in offloading_spec.config.groups
        )
        if len({group.tokens for group in groups}) > 1:
            spans = ", ".join(str(group.tokens) for group in groups)
            raise ValueError(f"chunks of the KV cache groups have {spans} tokens; pages are of one size")
        name = model or offloading_spec.config.model.name
        named = None if components is None else tuple(components)
        self._rows = primary_kv_view.cast("B")
        self._rows_at = address_of(self._rows)
        self._pool = PoolRows(pool_path, RowModel(name, self._block_size_bytes, groups, named))
        self._attachment: Attachment | None = None
        self._is_fresh = False
        token = Path(token_file).read_text(encoding="utf-8").strip() if token_file else None
        self._client = Client(url, token=token, timeout_s=timeout_ms / 1000)
        self._writer = RowWriter(self._client, name, tenant)
        self._stores = store
        self._loaders = ThreadPoolExecutor(load_threads, "forestage-load")
        self._storer = ThreadPoolExecutor(1, "forestage-store")
        self._running: dict[int, Future[None]] = {}
        self._finished: SimpleQueue[Any] = SimpleQueue()
        self._attached()

    # ---- what is there

    def lookup(self, key: Any, req_context: Any) -> Any:
        """Say whether a chunk is in the pool. Asks nobody."""
        attachment = self._attached()
        if attachment is None or attachment.find(get_offload_group_idx(key), get_offload_block_hash(key)) is None:
            return LookupResult.MISS
        return LookupResult.HIT

    def on_new_request(self, req_context: Any) -> Any:
        """Let vLLM store chunk by chunk."""
        return RequestOffloadingContext()

    def on_schedule_end(self, context: Any) -> None:
        """Look at the pool anew in the next step."""
        self._is_fresh = False

    def _attached(self) -> Attachment | None:
        """Return the pool with what is resident, as of the first call of this step."""
        if not self._is_fresh:
            self._is_fresh = True
            try:
                self._attachment = self._pool.attach()
            except (Mismatch, OSError) as error:
                self._attachment = None
                _log.tell(f"Forestage: the pool cannot be used: {error}", time.monotonic())
        return self._attachment

    # ---- transfers

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to copy pages from the pool into rows. What has gone since the lookup is reported as not loaded."""
        attachment = self._attached()
        keys = list(job_metadata.keys)
        wanted: list[tuple[int, bytes, int | None, int]] = []
        for key, row in zip(keys, job_metadata.chunk_ids.tolist(), strict=True):
            group, page = get_offload_group_idx(key), get_offload_block_hash(key)
            slot = attachment.find(group, page) if attachment is not None else None
            wanted.append((group, page, slot, self._rows_at + row * self._block_size_bytes))

        def load() -> _Outcome:
            if attachment is None:
                return _Outcome(0)
            loaded = tuple(
                key
                for key, (group, page, slot, target) in zip(keys, wanted, strict=True)
                if slot is not None and attachment.fill(group, page, slot, target)
            )
            return _Outcome(len(loaded), loaded)

        self._submit(self._loaders, job_metadata.job_id, len(keys), load)

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to write rows into the pool, from where the service takes them to L3."""
        attachment = self._attached() if self._stores else None
        keys = list(job_metadata.keys)
        size = self._block_size_bytes
        rows = [
            RowToWrite(
                get_offload_group_idx(key), get_offload_block_hash(key), self._rows[row * size : (row + 1) * size]
            )
            for key, row in zip(keys, job_metadata.chunk_ids.tolist(), strict=True)
        ]
        ends = [job_metadata.req_context.get_offload_key_position(key) or 0 for key in keys]
        rows = [row for _, row in sorted(zip(ends, rows, strict=True), key=lambda pair: pair[0])]

        def store() -> _Outcome:
            return _Outcome(0 if attachment is None else self._writer.write(attachment, rows))

        self._submit(self._storer, job_metadata.job_id, len(keys), store)

    def _submit(self, threads: ThreadPoolExecutor, job_id: int, count: int, transfer: Callable[[], _Outcome]) -> None:
        began = time.monotonic()

        def run() -> None:
            done = _Outcome(0)
            try:
                done = transfer()
            except (Away, ForestageError, Stale, OSError, ValueError) as error:
                _log.tell(f"Forestage: pages were not stored: {error}", time.monotonic())
            except Exception as error:
                _log.tell("Forestage: a transfer failed", time.monotonic(), error)
            finally:
                self._finished.put(
                    JobResult(
                        job_id=job_id,
                        success=done.count == count,
                        successful_keys=done.keys or None,
                        transfer_time=time.monotonic() - began,
                        transfer_bytes=done.count * self._block_size_bytes,
                    )
                )

        self._running[job_id] = threads.submit(run)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Return the results that have come since the last call."""
        results: list[Any] = []
        while True:
            try:
                result = self._finished.get_nowait()
            except Empty:
                return results
            self._running.pop(result.job_id, None)
            results.append(result)

    def drain_jobs(self) -> None:
        """Wait until no transfer is under way. A service that hangs ends none later than its calls time out."""
        wait(list(self._running.values()))

    def shutdown(self) -> None:
        """End what runs, and let go of vLLM's memory, of the pool and of the connections. Idempotent."""
        for threads in (self._loaders, self._storer):
            threads.shutdown(wait=True, cancel_futures=True)
        self._running.clear()
        self._rows.release()
        self._attachment = None
        self._is_fresh = True
        self._pool.close()
        self._client.close()
