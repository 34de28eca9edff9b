"""Measure the copy of resident pages into an engine's host pool, as the SGLang backend makes it, against plain memcpy.

    python benchmarks/sglang_copy.py [--mib 512] [--repeat 7]

The service runs in a process of its own and holds the pages. Plain: all addresses known beforehand, one memcpy a run of
bytes. Copy: what `batch_get_v1` does with pages that a job has brought, checks of the slots included. Get: all of it,
with the job that leases the pages and its release. Layouts: "page_first" has two runs a page, "layer_first" two for
each of 36 layers. Repetitions are interleaved, on one thread, into memory that was touched before; medians of GB/s.
"""

import argparse
import ctypes
import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import numpy.typing

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from forestage_client._memory import address_of
from forestage_client.integrations._host_pages import BytesPage, RunsPage
from forestage_client.integrations._sglang_settings import Rank, Settings
from forestage_client.integrations._shared_store import SharedStore
from support.configs import write_config
from support.running import running

__all__: list[str] = []

LAYERS = 36
SIZES = (64 << 10, 256 << 10, 1 << 20, 9 << 20)
BATCH = 128


@dataclass(frozen=True, slots=True)
class Host:
    """An engine's host pool: `pages` of it, as runs."""

    memory: numpy.typing.NDArray[numpy.uint8]
    pages: Sequence[RunsPage]


def make_host(layout: str, count: int, page_bytes: int) -> Host:
    """Return touched memory for so many pages, laid out as SGLang does."""
    memory = numpy.ones(count * page_bytes, dtype=numpy.uint8)
    base = memory.ctypes.data
    parts = 2 if layout == "page_first" else 2 * LAYERS
    run = page_bytes // parts
    stride = count * run
    runs = [[(base + part * stride + page * run, run) for part in range(parts)] for page in range(count)]
    return Host(memory, [RunsPage(tuple(some), parts * run, memory) for some in runs])


def measure(store: SharedStore, keys: Sequence[str], host: Host, repeat: int) -> tuple[float, float, float]:
    """Return the median seconds of plain, copy and get."""
    component = store.attach().components["kv"]
    plain_s, copy_s, get_s = [], [], []
    for _ in range(repeat):
        with store.fetch(keys) as fetched:
            assert fetched.ready == len(keys)
            view = fetched.attachment.view
            sources = [address_of(view.view(fetched.job.model, "kv", slot)) for slot in fetched.job.slots["kv"]]
            moves = [
                (address, source + size * run, size)
                for source, page in zip(sources, host.pages, strict=True)
                for run, (address, size) in enumerate(page.runs)
            ]
            began = time.perf_counter()
            for address, source, size in moves:
                ctypes.memmove(address, source, size)
            plain_s.append(time.perf_counter() - began)
            began = time.perf_counter()
            assert all(fetched.copy(component, 0, host.pages))
            copy_s.append(time.perf_counter() - began)
        began = time.perf_counter()
        with store.fetch(keys) as fetched:
            assert all(fetched.copy(component, 0, host.pages))
        get_s.append(time.perf_counter() - began)
    return statistics.median(plain_s), statistics.median(copy_s), statistics.median(get_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=7)
    arguments = parser.parse_args()
    print(
        f"{'layout':<12} {'page':>9} {'pages':>6} {'plain':>6} {'copy':>6} {'ratio':>6} {'get':>6} {'ratio':>6}  (GB/s)"
    )
    for size_bytes in SIZES:
        page_bytes = size_bytes - size_bytes % (2 * LAYERS)
        count = min(BATCH, (arguments.mib << 20) // page_bytes)
        keys = [hashlib.sha256(b"%d" % page).hexdigest() for page in range(count)]
        with tempfile.TemporaryDirectory(prefix="forestage-bench-", dir="/dev/shm") as folder:
            size = f"{page_bytes * (count + 2) + (64 << 20)}"
            config = write_config(Path(folder), slots=count, page_bytes=page_bytes, pool_bytes=size)
            with running(config) as service:
                store = SharedStore(Settings(service.url, "m", Rank(0, 1), read_ms=60_000, query_ms=60_000))
                store.attach(populate=True)
                contents = (bytearray(key.encode() * (page_bytes // 64 + 1))[:page_bytes] for key in keys)
                written = {page: BytesPage(content) for page, content in enumerate(contents)}
                while store.write(keys, {"kv": written}, {}) < count:  # L3 may be behind
                    time.sleep(0.1)
                for layout in ("page_first", "layer_first"):
                    host = make_host(layout, count, page_bytes)
                    plain, copy, get = measure(store, keys, host, arguments.repeat)
                    gb = count * page_bytes / 1e9
                    print(
                        f"{layout:<12} {page_bytes / 1024:>5.0f} KiB {count:>6} {gb / plain:>6.2f} {gb / copy:>6.2f} "
                        f"{plain / copy:>6.2f} {gb / get:>6.2f} {plain / get:>6.2f}",
                        flush=True,
                    )
                store.close()


if __name__ == "__main__":
    main()
