"""Measure what an idle service takes, and how long its client takes to import.

    python benchmarks/idle.py [--seconds 10] [--mib 1024] [--repeat 7] [--json FILE]

  CPU     percent of a core that `forestage serve` takes while nobody asks for anything
  RSS     its resident memory without the shared pool, MiB; and whether it has torch loaded
  import  `import forestage_client` in a Python of its own, milliseconds, and whether that brought torch or fastapi
The service is measured once over all the seconds, the import again and again: median (spread).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _support import add_options, print_table, write_json
from support.configs import write_config
from support.running import running

__all__: list[str] = []

_IMPORT = """
import sys, time
begin = time.perf_counter()
import forestage_client
spent = time.perf_counter() - begin
print(1e3 * spent, *sorted({"torch", "fastapi", "forestage"} & set(sys.modules)))
"""


def _cpu_s(pid: int) -> float:
    """Return CPU seconds to the nanosecond, of all threads; clock ticks are too coarse for next to nothing."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _own_mib(pid: int) -> float:
    """Return resident memory that is not shared memory."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile")) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--mib", type=int, default=1024, help="of the pool")
    parser.add_argument("--folder", default="/dev/shm")
    add_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="forestage-bench-", dir=options.folder) as name:
        slots = (options.mib - 32) << 4
        config = write_config(Path(name), slots=slots, page_bytes=65536, pool_bytes=f"{options.mib}MiB")
        with running(config, "--log-level", "error") as service:
            pid = service.process.pid
            time.sleep(2.0)  # what the start leaves behind
            begin, cpu = time.perf_counter(), _cpu_s(pid)
            time.sleep(options.seconds)
            percent = 100 * (_cpu_s(pid) - cpu) / (time.perf_counter() - begin)
            own_mib = _own_mib(pid)
            has_torch = "torch" in Path(f"/proc/{pid}/maps").read_text()
    imports: list[float] = []
    brought: set[str] = set()
    for turn in range(options.repeat + 1):
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True, env=os.environ
        )
        spent, *modules = done.stdout.split()
        brought.update(modules)
        if turn:  # the first one reads files that no one has read for long
            imports.append(float(spent))
    rows: list[dict[str, Any]] = [
        {"what": "idle CPU %", "measured": percent, "target": 0.5},
        {"what": "RSS beside the pool, MiB", "measured": own_mib, "target": 90},
        {"what": "torch in the service", "measured": "yes" if has_torch else "no", "target": "no"},
        {"what": "import of forestage_client, ms", "measured": imports, "target": 120},
        {"what": "torch, fastapi, forestage by that", "measured": " ".join(sorted(brought)) or "no", "target": "no"},
    ]
    print_table(f"idle: {options.seconds:g} s, pool of {options.mib} MiB", rows)
    write_json(options.json, "idle", rows, seconds=options.seconds, mib=options.mib, repeat=options.repeat)
    return 0


if __name__ == "__main__":
    sys.exit(main())
