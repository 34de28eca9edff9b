"""Measure files -> slot memory through the file storages against plain `preadv` of the same files.

    python benchmarks/read_files.py [--mib 512] [--repeat 5] [--readers N] [--dir DIR]

Both sides use the same number of threads and the same destination, a populated shared mapping. Plain means: paths and
views made beforehand, each thread takes its share of the files and does open, preadv, close. The storages read in
batches as the service does (on its event loop), report every page, and (kind file) verify every checksum. Repetitions
are interleaved; the files are in the page cache. Prints one line a kind and page size: GB/s of both and their ratio,
and CPU seconds per GB of both and their ratio, which tell more where others share the machine. All are medians.
"""

import argparse
import asyncio
import hashlib
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

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


async def measure(storage: DirectoryStorage, page_bytes: int, total: int, repeat: int) -> str:
    """Write the files, read them both ways in turn, and return a line of the table."""
    readers = storage.batches_in_flight // 2
    model = ModelLayout("bench", 64, (Component("kv", page_bytes),))
    num_pages = total // page_bytes
    keys = [hashlib.sha256(index.to_bytes(8, "little")).digest() for index in range(num_pages)]
    pool = mmap.mmap(-1, total)
    views = [memoryview(pool)[index * page_bytes : (index + 1) * page_bytes] for index in range(num_pages)]
    for key, view in zip(keys, views, strict=True):
        view[:] = os.urandom(page_bytes)
        await storage.write(model, 0, key, (view,))
    shelf = storage.shelves(model)[0]
    paths = [shelf.paths(key)[0] for key in keys]
    rounds: list[tuple[float, float, float, float]] = []
    for _ in range(repeat + 1):
        begin = time.process_time()
        plain_s = plain(paths, views, readers)
        middle = time.process_time()
        through_s = await through(storage, model, keys, views)
        rounds.append((plain_s, through_s, middle - begin, time.process_time() - middle))
    await storage.aclose()
    del rounds[0]  # for warming up
    size = total / 1e9
    rates = [size / statistics.median(seconds) for seconds in list(zip(*rounds, strict=True))[:2]]
    cpu = [statistics.median(seconds) / size for seconds in list(zip(*rounds, strict=True))[2:]]
    ratio = statistics.median(one / other for one, other, _, _ in rounds)
    cpu_ratio = statistics.median(one / other for _, _, one, other in rounds)
    return (
        f"{storage.kind:>13} {page_bytes >> 10:>6} KiB {readers:>8} {rates[0]:>8.2f} {rates[1]:>8.2f} {ratio:>6.2f}"
        f"{cpu[0]:>11.3f} {cpu[1]:>8.3f} {cpu_ratio:>6.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="files -> memory GB/s, through the storages and plain")
    parser.add_argument("--mib", type=int, default=512, help="MiB of pages per row")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--readers", type=int, default=0, help="reading threads, 0: the default of this machine")
    parser.add_argument("--dir", default=None, help="where to put the files while measuring")
    options = parser.parse_args()
    sys.setswitchinterval(0.0005)  # as the service does
    print(f"{'kind':>13} {'page':>10} {'threads':>8} {'GB/s':>8} {'through':>8} {'ratio':>6}", end="")
    print(f"{'CPU s/GB':>11} {'through':>8} {'ratio':>6}")
    kinds: tuple[type[FileStorage | HicacheFileStorage], ...] = (FileStorage, HicacheFileStorage)
    for page_bytes in PAGE_BYTES:
        for kind in kinds:
            root = Path(tempfile.mkdtemp(prefix="forestage-bench-", dir=options.dir))
            try:
                storage = kind(root, readers=options.readers)
                line = uvloop.run(measure(storage, page_bytes, options.mib << 20, options.repeat))
            finally:
                shutil.rmtree(root)
            print(line, flush=True)


if __name__ == "__main__":
    main()
