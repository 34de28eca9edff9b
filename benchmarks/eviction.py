"""Compare policies of eviction on the requests of a trace: no I/O, no time, prefix hits as a share of Belady's.

    python benchmarks/eviction.py [--trace FILE] [--requests 1000] [--percent 1 2 5 ...] [--json FILE] [--plot FILE]

A page is one block of the trace (512 tokens there). A hit is a page that is resident, and all before it, when its
request comes. Pools are sized in percent of the unique pages. `forestage` is the service's own code (core.index,
core.wants); hints name the next so many requests. The figures are the same on every machine.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from _plots import plot_lines
from _policies import POLICIES, hits_of
from _support import print_table, write_json
from _trace import add_trace_options, load_trace, unique_pages

_PEERS = ("LRU", "S3-FIFO", "SLRU 80 %", "aged LFU")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_trace_options(parser, 1000)
    parser.add_argument("--percent", type=float, nargs="+", default=[1, 2, 5, 10, 20, 50], help="pool sizes")
    parser.add_argument("--repeat", type=int, help="ignored: every run gives the same")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the table as PNG, if matplotlib is there")
    args = parser.parse_args()
    requests = load_trace(args)
    prompts = [request.keys for request in requests]
    unique, asked = unique_pages(requests), sum(map(len, prompts))
    pools = {f"{percent:g} %": max(1, int(unique * percent / 100)) for percent in args.percent}
    hits: dict[str, dict[str, int]] = {name: {} for name in POLICIES}
    for size, capacity in pools.items():
        for name, policy in POLICIES.items():
            hits[name][size] = hits_of(policy(capacity, prompts), prompts)
    best = hits["Belady"]
    rows: list[dict[str, Any]] = [
        {"policy": name, **{size: f"{of[size] / max(1, best[size]):.3f}" for size in pools}}
        for name, of in hits.items()
    ]
    margin = {
        size: f"{hits['forestage'][size] / max(1, *(hits[peer][size] for peer in _PEERS)) - 1:+.1%}" for size in pools
    }
    rows.append({"policy": "forestage beside the best of four", **margin})
    rows.append({"policy": "Belady, of all pages asked for", **{size: f"{best[size] / asked:.3f}" for size in pools}})
    source = args.trace.name if args.trace else "made up"
    print_table(f"{len(prompts)} requests ({source}), {asked} pages, {unique} of them unique", rows)
    write_json(args.json, "eviction", rows, source=source, requests=len(prompts), pools=pools)
    if args.plot:
        lines = {
            name: [of[size] / max(1, best[size]) for size in pools] for name, of in hits.items() if name != "Belady"
        }
        plot_lines(args.plot, "prefix hits as a share of Belady's", list(pools), lines, "pool, of the unique pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
