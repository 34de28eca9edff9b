"""How long a start of the service takes until it says that it is ready, by what it finds at the pool's path.

    python benchmarks/restarts.py [--gib 4] [--repeat 5]

New: there is no file, all of it is reserved and touched. Adopted empty, full: a service that was killed left the pool,
without and with a page in every slot. Dirty: adopted full, and L3 has none of the pages yet. Memory is touched, not
pinned. Cases are interleaved; seconds are those of the whole process, the imports of Python among them, which a pool of
4 MiB takes too.
"""

import argparse
import hashlib
import os
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from _support import add_options, print_progress, print_table, write_json
from forestage.assembly import pool_settings
from forestage.config import load
from forestage.pool.file import PoolFile
from support.running import running

__all__: list[str] = []

CASES = ("new", "adopted empty", "adopted full", "adopted dirty")

CONFIG = """
[server]
port = 0
[pool]
path = "{folder}/pool"
bytes = "{gib}GiB"
pin = "none"
[storage.file]
root = "{folder}/l3"
[[models]]
name = "m"
page_tokens = 64
[[models.components]]
name = "kv"
bytes = {page_bytes}
"""


def put_pages(config: Path, case: str) -> int:
    """Bring the pool into the state that a killed service left; return how many pages it has."""
    loaded = load(str(config), {})
    path = Path(loaded.pool.path)
    if case == "new":
        path.unlink(missing_ok=True)
        return 0
    pool = PoolFile.create(pool_settings(loaded), loaded.layouts())
    (table,) = pool.tables
    slots = pool.geometry.regions[0].slots
    for slot in range(slots):
        table.clear(slot)
    num_pages = 0 if case == "adopted empty" else slots
    for slot in range(num_pages):
        table.begin_fill(slot)
        table.publish(slot, hashlib.sha256(slot.to_bytes(8, "little")).digest(), slot, case == "adopted dirty")
    pool.close()
    return num_pages


def start(config: Path) -> float:
    """Return the seconds until a service is ready; it is killed then."""
    begin = time.perf_counter()
    with running(config) as service:
        took = time.perf_counter() - begin
        service.stop(signal.SIGKILL)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=4, help="size of the pool")
    parser.add_argument("--page-kib", type=int, default=256, help="size of a page")
    add_options(parser, repeat=5)
    args = parser.parse_args()
    seconds: dict[str, list[float]] = defaultdict(list)
    pages: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="forestage-bench-", dir="/dev/shm") as name:
        folder = Path(name)
        config = folder / "forestage.toml"
        config.write_text(CONFIG.format(folder=folder, gib=args.gib, page_bytes=args.page_kib << 10))
        (layout,) = load(str(config), {}).layouts()
        (folder / "l3").mkdir()
        # Where a directory should be, so that L3 takes no dirty page and the next case finds it as it was.
        (folder / "l3" / layout.fingerprint).write_text("in the way")
        for _ in range(args.repeat):
            for case in CASES:
                pages[case] = put_pages(config, case)
                seconds[case].append(start(config))
                print_progress({"pool": case, "s": seconds[case][-1]})
        # What any start takes, whatever its pool: the smallest one there can be.
        small = folder / "small.toml"
        small.write_text(config.read_text().replace(f"{args.gib}GiB", "4MiB").replace("/pool", "/small"))
        for _ in range(args.repeat):
            (folder / "small").unlink(missing_ok=True)
            seconds["of 4 MiB, new"].append(start(small))
    rows = [
        {"pool": case, "pages": pages.get(case, 0), "ready after s": taken, "beyond 4 MiB s": 0.0}
        for case, taken in seconds.items()
    ]
    least = statistics.median(seconds["of 4 MiB, new"])
    for row in rows:
        row["beyond 4 MiB s"] = statistics.median(row["ready after s"]) - least  # type: ignore[arg-type]
    print_table(f"start of a service with a pool of {args.gib} GiB, {os.cpu_count()} CPUs", rows)
    write_json(args.json, "restart", rows, gib=args.gib, page_kib=args.page_kib)


if __name__ == "__main__":
    main()
