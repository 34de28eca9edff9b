"""Copy pages from the shared pool to a GPU, verify them there, and compare with other host memory.

    python benchmarks/gpu_copy.py [--device cuda] [--mib 1024] [--page 1024] [--run 16] [--repeat 7] [--json FILE]

One process has the pool; a second one attaches, registers it by `PoolView.pin()` and copies, as an engine does, from
  pool      the registered mapping
  pinned    memory that torch has pinned itself
  pageable  ordinary memory
with the same content: page by page, the slots in random order, and in runs of neighbouring slots, one copy each.
Shown are GB/s (median, spread) by CUDA events around all copies, the median ratio to torch's own pinned memory, and how
much of the shorter of copies and computing is hidden when both start at once on two streams: 1 is all of it, 0 nothing.
After every repetition all bytes on the device are compared with what the keys of their pages say.

Without a usable GPU it says so in one line and ends with exit code 77. `--device cpu` runs the same without CUDA: to
see that it works; its figures say nothing about a GPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from _pool_pages import filled_pool
from _support import add_options, print_table, write_json

__all__ = ["SKIPPED", "main"]

#: Exit code of what was not run, as automake and others have it.
SKIPPED = 77


def _why_not() -> str:
    """Say why nothing can be copied to a GPU here; empty when it can."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no usable CUDA device"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--mib", type=int, default=1024, help="MiB of pages")
    parser.add_argument("--page", type=int, default=1024, help="page size in KiB")
    parser.add_argument("--run", type=int, default=16, help="pages of a run")
    parser.add_argument("--folder", default="/dev/shm", help="where the pool lies")
    parser.add_argument("--attach", type=Path, help=argparse.SUPPRESS)  # the second process
    add_options(parser)
    options = parser.parse_args()
    if options.attach:
        # Only where pages are copied: torch takes its seconds to import.
        from _host_copies import measure

        print(json.dumps(measure(options.attach, options.device, options.run, options.repeat)))
        return 0
    if options.device == "cuda" and (reason := _why_not()):
        print(f"gpu_copy: SKIPPED, nothing was checked: {reason}", file=sys.stderr)
        return SKIPPED
    page = options.page << 10
    with (
        tempfile.TemporaryDirectory(prefix="forestage-bench-", dir=options.folder) as folder,
        filled_pool(Path(folder, "pool"), page, (options.mib << 20) // page),
    ):
        words = ["--attach", f"{folder}/pool", "--device", options.device]
        words += ["--run", str(options.run), "--repeat", str(options.repeat)]
        done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, check=True, text=True)
    rows = json.loads(done.stdout)
    print_table(
        f"host to {options.device}, {options.mib} MiB in pages of {options.page} KiB, every byte verified", rows
    )
    write_json(options.json, "gpu_copy", rows, mib=options.mib, page_kib=options.page, repeat=options.repeat)
    return 0


if __name__ == "__main__":
    sys.exit(main())
