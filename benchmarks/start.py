"""Measure how long a pool takes to be backed with memory at start, beside memset of the same memory by 2 threads.

    python benchmarks/start.py [--mib 2048] [--repeat 7] [--json FILE]

Both on a new file on tmpfs each time, in turn.
  prefault  `populate`, as a start does it
  memset    the same mapping, halved among 2 threads: faults and zeroing, without the advice to the kernel
  create    all of `PoolFile.create`: reserve, map, prefault, header and slot table
Shown are milliseconds (median, spread) and the median ratio of prefault to memset, at most 1.15.
"""

import argparse
import ctypes
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from _support import add_options, print_table, write_json
from forestage.core.layout import Component, ModelLayout
from forestage.pool import libc
from forestage.pool.file import PoolFile, PoolSettings
from forestage.pool.mount import Mount
from forestage.pool.populate import populate

__all__: list[str] = []


def _on_new_file(folder: Path, size: int, work: Callable[[int, mmap.mmap], None]) -> float:
    """Return the milliseconds of some work on a mapping that has no memory yet."""
    path = folder / "memory"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        mapping = mmap.mmap(fd, size)
        begin = time.perf_counter()
        work(fd, mapping)
        spent = time.perf_counter() - begin
        mapping.close()
    finally:
        os.close(fd)
        path.unlink()
    return 1e3 * spent


def _memset(_fd: int, mapping: mmap.mmap) -> None:
    address, half = libc.address_of(mapping), len(mapping) // 2
    threads = [threading.Thread(target=ctypes.memset, args=(address + at, 0, half)) for at in (0, half)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _create(folder: Path, size: int) -> float:
    slots = (size - (64 << 20)) >> 20
    model = ModelLayout("bench", 64, (Component("kv", 1 << 20, slots=slots),))
    path = folder / "pool"
    begin = time.perf_counter()
    pool = PoolFile.create(PoolSettings(str(path), size, pin="none"), (model,))
    spent = time.perf_counter() - begin
    pool.close()
    path.unlink()
    return 1e3 * spent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--folder", default="/dev/shm", help="a tmpfs")
    add_options(parser)
    options = parser.parse_args()
    size = options.mib << 20
    samples: dict[str, list[float]] = {"prefault": [], "memset": [], "create": []}
    with tempfile.TemporaryDirectory(prefix="forestage-bench-", dir=options.folder) as name:
        folder = Path(name)
        mount = Mount.holding(name)
        for turn in range(options.repeat + 1):
            spent = {
                "prefault": _on_new_file(folder, size, lambda fd, mapping: populate(fd, mapping, mount)),
                "memset": _on_new_file(folder, size, _memset),
                "create": _create(folder, size),
            }
            if turn:  # the first one is for warming up
                for what, milliseconds in spent.items():
                    samples[what].append(milliseconds)
    ratio = statistics.median(a / b for a, b in zip(samples["prefault"], samples["memset"], strict=True))
    row = {
        "MiB": options.mib,
        **{f"{what} ms": values for what, values in samples.items()},
        "ratio": ratio,
        "target": 1.15,
    }
    print_table(f"start, median of {options.repeat} (lowest-highest)", [row])
    write_json(options.json, "start", [row], mib=options.mib, repeat=options.repeat)
    return 0


if __name__ == "__main__":
    sys.exit(main())
