"""Measure small urgent jobs beside a large one, and how late the event loop is under full load.

    python benchmarks/urgent.py [--mib 4096] [--page 1024] [--repeat 7] [--json FILE]

A real `forestage serve` over files in the page cache, all pages read from them each time.
  urgent   jobs of 16 pages with a higher priority, one after another, milliseconds from request to answer: alone, and
           while one job loads so many MiB; p50 and p99 of all samples, ratio at most 3
  lag      by how much a timer of one millisecond in the service's own loop is late, while 8 jobs load at once: p99 at
           most 5 ms; beside it the same timer while nothing is asked for, which is what the machine makes of it
Alone, beside and 8 jobs take turns.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _fleet import percentile
from _support import add_options, make_keys, print_table, write_json
from forestage.config import load
from forestage.storage.files import FileStorage
from forestage_client import Client
from support.configs import write_config
from support.running import running

__all__: list[str] = []

_SMALL = 16
_JOBS = 8
_ENTRY = (str(Path(__file__).with_name("_lagging_service.py")),)
_CHAINS = 64
_QUIET_S = 0.3


async def _store(config: Path, chains: Sequence[Sequence[bytes]], page: int) -> None:
    layout = load(str(config), {}).layouts()[0]
    storage = FileStorage(config.parent / "l3")
    await storage.open()
    payload = bytes(range(256)) * (page // 256)
    for keys in chains:
        for at in range(0, len(keys), 64):
            await asyncio.gather(*(storage.write(layout, 0, key, [payload]) for key in keys[at : at + 64]))
    await storage.aclose()


class _Service:
    """The service under test. The pool is so large that what a job brought is gone when its turn comes again."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = Client(url, timeout_s=300)

    def small(self, keys: Sequence[bytes]) -> float:
        """Return the milliseconds that an urgent job takes."""
        begin = time.perf_counter()
        job = self._client.prefetch("m", keys, priority=10, wait_ms=120_000)
        spent = 1e3 * (time.perf_counter() - begin)
        if job.loaded != len(keys):
            raise RuntimeError(f"not what was to be measured: {job}")
        self._client.cancel(job.request_id)
        return spent

    def load(self, keys: Sequence[bytes]) -> None:
        """Load a prefix."""
        with Client(self._url, timeout_s=300) as client:
            job = client.prefetch("m", keys, wait_ms=300_000)
            if job.pages.ready != len(keys) or job.loaded < 0.8 * len(keys):
                raise RuntimeError(f"not what was to be measured: {job}")
            client.cancel(job.request_id)


def _smalls(service: _Service, chains: Sequence[Sequence[bytes]], large: threading.Thread | None = None) -> list[float]:
    """Run an urgent job for each chain, or for as many as there is time for while a large job loads."""
    samples = [service.small(keys) for keys in chains if large is None or large.is_alive()]
    # One that ended after the large job was only partly beside it.
    return samples if large is None or large.is_alive() else samples[:-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=4096, help="MiB of the large job, and of the 8 together")
    parser.add_argument("--page", type=int, default=256, help="page size in KiB")
    parser.add_argument("--files", help="where the files lie; they should fit into the page cache")
    add_options(parser)
    options = parser.parse_args()
    page, count = options.page << 10, (options.mib << 20) // (options.page << 10)
    smalls = [make_keys(_SMALL, chain) for chain in range(1, 2 * _CHAINS + 1)]
    large = make_keys(count)
    eighth = count // _JOBS
    parts = [make_keys(eighth, -1 - job) for job in range(_JOBS)]
    alone: list[float] = []
    beside: list[float] = []
    quiet_lag: list[float] = []
    full_lag: list[float] = []
    ratio: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="forestage-bench-", dir=options.files) as files,
        tempfile.TemporaryDirectory(prefix="forestage-bench-", dir="/dev/shm") as pools,
    ):
        lags = Path(pools, "lags")
        slots = count + _CHAINS * _SMALL
        config = write_config(
            Path(files),
            slots=slots,
            page_bytes=page,
            pool_bytes=f"{(slots * page >> 20) + 64}MiB",
            prefetch="max_inflight_fraction = 1.0",
        )
        # The pool on tmpfs, the files on a disk: two times these bytes may be more than memory.
        config.write_text(config.read_text().replace(f'path = "{files}/pool"', f'path = "{pools}/pool"'))
        asyncio.run(_store(config, [*smalls, large, *parts], page))
        with running(config, "--log-level", "error", environ={"LAG_FILE": str(lags)}, entry=_ENTRY) as started:
            service = _Service(started.url)
            spans: dict[str, list[tuple[float, float]]] = {"quiet": [], "full": []}
            for turn in range(options.repeat + 1):
                begin = time.time()
                time.sleep(_QUIET_S)
                quiet = begin, time.time()
                some = _smalls(service, smalls[:_CHAINS])
                thread = threading.Thread(target=service.load, args=(large,))
                thread.start()
                time.sleep(0.02)  # it has been admitted, and reads
                others = _smalls(service, smalls[_CHAINS:], thread)
                thread.join()
                begin = time.time()
                threads = [threading.Thread(target=service.load, args=(part,)) for part in parts]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                if not turn:  # the first one is for warming up
                    continue
                alone += some
                beside += others
                ratio.append(percentile(others, 0.99) / percentile(some, 0.99))
                spans["quiet"].append(quiet)
                spans["full"].append((begin, time.time()))
            started.stop()
        noted = [tuple(map(float, line.split())) for line in lags.read_text().splitlines()]
    for when, late in noted:
        quiet_lag += [late] if any(a < when < b for a, b in spans["quiet"]) else []
        full_lag += [late] if any(a < when < b for a, b in spans["full"]) else []
    rows: list[dict[str, Any]] = [
        {
            "what": what,
            "p50 ms": percentile(values, 0.5),
            "p99 ms": percentile(values, 0.99),
            "max ms": max(values),
            "samples": len(values),
        }
        for what, values in (
            (f"{_SMALL} pages alone", alone),
            (f"{_SMALL} pages beside", beside),
            ("loop late, nothing asked", quiet_lag),
            (f"loop late, {_JOBS} jobs", full_lag),
        )
    ]
    print_table(f"{options.mib} MiB in pages of {options.page} KiB from files, {options.repeat} rounds", rows)
    overall = rows[1]["p99 ms"] / rows[0]["p99 ms"]
    print(f"p99 beside to p99 alone: {overall:.2f}, median of rounds {statistics.median(ratio):.2f}")
    write_json(options.json, "urgent", rows, mib=options.mib, page_kib=options.page, repeat=options.repeat, ratio=ratio)
    return 0


if __name__ == "__main__":
    sys.exit(main())
