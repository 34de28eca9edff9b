"""Measure files -> slot memory through the file storages against plain reads of the same files.

    python benchmarks/read_files.py [--mib 512] [--repeat 7] [--readers N] [--dir DIR] [--json FILE]

  warm   the files are in the page cache. Plain means `preadv` by the same number of threads into the same memory: paths
         and views made beforehand, each thread takes its share of the files and does open, preadv, close
  cold   kind file with `direct`, which reads past the page cache. Plain means `dd iflag=direct` of one file of the same
         size on the same disk, 4 MiB at a time
Both sides have the same populated mapping. The storages read in batches as the service does (on its event loop), report
every page, and (kind file) verify every checksum. Repetitions are interleaved. Shown are GB/s (median, spread), the
median ratio, and CPU seconds per GB of both, which tell more where others share the machine.
"""

import argparse
import asyncio
import hashlib
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from _support import add_options, print_table, write_json
from forestage.core.layout import Component, ModelLayout
from forestage.storage.base import PageRead, ReadOutcome
from forestage.storage.directory import DirectoryStorage
from forestage.storage.files import FileStorage
from forestage.storage.hicache import HicacheFileStorage

__all__: list[str] = []

PAGE_BYTES = (64 << 10, 256 << 10, 1 << 20)


def plain(paths: Sequence[str], views: Sequence[memoryview], num_threads: int) -> float:
    """Return the seconds that `num_threads` threads need to read every file into its view."""

    def share(first: int) -> None:
        for path, view in zip(paths[first::num_threads], views[first::num_threads], strict=True):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            os.preadv(descriptor, (view,), 0)
            os.close(descriptor)

    threads = [threading.Thread(target=share, args=(first,)) for first in range(num_threads)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


async def through(
    storage: DirectoryStorage, model: ModelLayout, keys: Sequence[bytes], views: list[memoryview]
) -> float:
    """Return the seconds that the storage needs for the same, with its own batch size and batches in flight."""
    page_bytes = model.components[0].bytes
    reads = [PageRead(0, key, (view,)) for key, view in zip(keys, views, strict=True)]
    done = 0
    outcomes: list[ReadOutcome] = []

    def report(index: int, outcome: ReadOutcome) -> None:
        outcomes.append(outcome)

    async def feed() -> None:
        nonlocal done
        while done < len(reads):
            batch = reads[done : done + max(1, storage.batch_bytes // page_bytes)]
            done += len(batch)
            await storage.read_into(model, batch, report)

    begin = time.perf_counter()
    await asyncio.gather(*(feed() for _ in range(storage.batches_in_flight)))
    seconds = time.perf_counter() - begin
    assert outcomes == [ReadOutcome.LOADED] * len(keys)
    return seconds


def dd(path: Path) -> float:
    """Return the seconds that `dd` needs to read a file past the page cache, without those to start it."""
    command = ["dd", f"if={path}", "of=/dev/null", "iflag=direct", "bs=4M"]
    said = subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True, env={"LC_ALL": "C"}).stderr
    return float(said.rsplit(" s, ", 1)[0].rsplit(" ", 1)[1])


async def measure(
    storage: DirectoryStorage, page_bytes: int, total: int, repeat: int, cold: Path | None = None
) -> dict[str, Any]:
    """Write the files, read them both ways in turn, and return a row; `cold` is the file for `dd`."""
    readers = storage.batches_in_flight // 2
    model = ModelLayout("bench", 64, (Component("kv", page_bytes),))
    num_pages = total // page_bytes
    keys = [hashlib.sha256(index.to_bytes(8, "little")).digest() for index in range(num_pages)]
    pool = mmap.mmap(-1, total)
    views = [memoryview(pool)[index * page_bytes : (index + 1) * page_bytes] for index in range(num_pages)]
    for key, view in zip(keys, views, strict=True):
        view[:] = os.urandom(page_bytes)
        await storage.write(model, 0, key, (view,))
    if cold is not None:
        await asyncio.to_thread(cold.write_bytes, pool)
    os.sync()
    shelf = storage.shelves(model)[0]
    paths = [shelf.paths(key)[0] for key in keys]
    rounds: list[tuple[float, float, float, float]] = []
    for _ in range(repeat + 1):
        begin = time.process_time()
        plain_s = plain(paths, views, readers) if cold is None else dd(cold)
        middle = time.process_time()
        through_s = await through(storage, model, keys, views)
        rounds.append((plain_s, through_s, middle - begin, time.process_time() - middle))
    await storage.aclose()
    del rounds[0]  # for warming up
    size = total / 1e9
    return {
        "kind": storage.kind,
        "read": "warm" if cold is None else "cold",
        "page KiB": page_bytes >> 10,
        "threads": readers,
        "plain GB/s": [size / one for one, _, _, _ in rounds],
        "storage GB/s": [size / other for _, other, _, _ in rounds],
        "/plain": statistics.median(one / other for one, other, _, _ in rounds),
        "cpu s/GB: plain": statistics.median(one for _, _, one, _ in rounds) / size if cold is None else float("nan"),
        "storage": statistics.median(other for _, _, _, other in rounds) / size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="MiB of pages per row")
    parser.add_argument("--readers", type=int, default=0, help="reading threads, 0: the default of this machine")
    parser.add_argument("--dir", type=Path, default=None, help="where to put the files while measuring")
    add_options(parser)
    options = parser.parse_args()
    sys.setswitchinterval(0.0005)  # as the service does
    total = options.mib << 20
    rows = []
    for page_bytes in PAGE_BYTES:
        for kind in ("file", "hicache-file", "cold"):
            with tempfile.TemporaryDirectory(prefix="forestage-bench-", dir=options.dir) as name:
                root = Path(name)
                storage: DirectoryStorage
                if kind == "hicache-file":
                    storage = HicacheFileStorage(root / "l3", readers=options.readers)
                else:
                    storage = FileStorage(root / "l3", direct=kind == "cold", readers=options.readers)
                cold = root / "all" if kind == "cold" else None
                rows.append(uvloop.run(measure(storage, page_bytes, total, options.repeat, cold)))
    print_table(f"files -> memory, {options.mib} MiB a row, median of {options.repeat} (lowest-highest)", rows)
    write_json(options.json, "read_files", rows, mib=options.mib, repeat=options.repeat)


if __name__ == "__main__":
    main()
