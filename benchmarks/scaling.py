"""Simulate 10 to 300 services on one Redis Cluster or shared file system: what is busy, and what is full first.

    python benchmarks/scaling.py [--pods 10 30 100 300] [--nodes 3 10 30 100] [--rate 0.5] [--seed 0] [--json FILE]

Each pod is asked for prefixes of 96 pages of 9 MiB (6144 tokens of an 8B model with 64-token pages), of which 32 are
one of 100 common heads. `_fleet_run.py` is the simulation, `scaling_check.py` measures what it is fed with, and what to
do about each limit is in `docs/scaling.md`.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from _fleet import GIB, Costs, Fleet, Load, Result, capacities, percentile
from _fleet_run import simulate
from _support import print_table, write_json

__all__ = ["FILES", "MEASURED", "chat"]

#: On one core of the machine of docs/scaling.md, by `scaling_check.py`.
MEASURED = Costs(
    pod_s_per_gib=0.55,
    pod_s_per_key=0.7e-6,
    pod_s_per_job=1.4e-3,
    node_s_per_gib=0.36,
    node_s_per_read=18e-6,
    node_s_per_key=0.55e-6,
)
#: Readers by `read_files.py`; a server of names is assumed to look up 30 000 a second.
FILES = replace(MEASURED, pod_s_per_gib=0.21, pod_s_per_key=4e-6, meta_s_per_op=1 / 30_000)
_PAGE = 9 << 20
_PAGES_A_RUN = 8_000  # so many pages are enough for a median, and for a 99th percentile to be near


def chat(rate: float, page_bytes: int = _PAGE, *, resident_heads: int = 0, pinned: int = 0) -> Load:
    """Return the load of a pod; pools hold so many heads besides what is on its way."""
    scale = _PAGE / page_bytes
    head, tail = round(32 * scale), round(64 * scale)
    return Load(rate, head, tail, pool_pages=resident_heads * head + 4 * tail, pinned=pinned)


def _run(fleet: Fleet, load: Load, seed: int) -> Result:
    pages = load.head_pages + load.tail_pages
    seconds = max(2.0, min(60.0, _PAGES_A_RUN / (fleet.pods * load.requests_per_s * pages)))
    return simulate(fleet, load, seconds, warm_up=seconds / 2, seed=seed)


def _row(fleet: Fleet, load: Load, seen: Result) -> dict[str, Any]:
    loaded = (load.head_pages + load.tail_pages) * (1 - seen.resident_share)
    bounds = capacities(fleet, loaded, loaded)
    first = min(bounds, key=bounds.__getitem__)
    return {
        "GB/s": seen.bytes_per_s / 1e9,
        "job p50 ms": 1e3 * percentile(seen.job_s, 0.5),
        "p99 ms": 1e3 * percentile(seen.job_s, 0.99),
        "probe p99 ms": 1e3 * percentile(seen.probe_s, 0.99),
        "first": first,
        "at requests/s": bounds[first],
        "busy": seen.busy_mean[first],
        "busiest": seen.busy[first],
    }


def _sizes(pods: Sequence[int], nodes: Sequence[int], rate: float, seed: int) -> list[dict[str, Any]]:
    rows = []
    for count in pods:
        for num_nodes in nodes:
            fleet, load = Fleet(count, num_nodes, MEASURED, _PAGE), chat(rate)
            row = {"pods": count, "nodes": num_nodes, "requests/s": count * rate, "links/node": fleet.links_per_node}
            rows.append(row | _row(fleet, load, _run(fleet, load, seed)))
    return rows


def _page_sizes(rate: float, seed: int) -> list[dict[str, Any]]:
    rows = []
    for tokens in (4, 16, 64, 256):
        fleet = Fleet(100, 30, MEASURED, _PAGE * tokens // 64)
        load = chat(rate, fleet.page_bytes)
        keys_per_s = 100 * rate * (load.head_pages + load.tail_pages)
        costs = MEASURED
        read_s = fleet.page_bytes / GIB * costs.node_s_per_gib + costs.node_s_per_read
        row = {
            "tokens": tokens,
            "page MiB": fleet.page_bytes / (1 << 20),
            "keys probed/s": keys_per_s,
            "probes of node %": 100 * costs.node_s_per_key / (costs.node_s_per_key + read_s),
        }
        rows.append(row | _row(fleet, load, _run(fleet, load, seed)))
    return rows


def _heads(rate: float, seed: int) -> list[dict[str, Any]]:
    fleet = Fleet(100, 30, MEASURED, _PAGE)
    rows = []
    for words, resident, pinned in (
        ("no room for heads", 0, 0),
        ("room for 20, least recent goes", 20, 0),
        ("room for 20, first 20 pinned", 20, 20),
        ("room for all", 100, 100),
    ):
        load = chat(rate, resident_heads=resident, pinned=pinned)
        seen = simulate(fleet, load, 4.0, warm_up=30.0 if resident > pinned else 2.0, seed=seed)
        rows.append({"heads": words, "resident %": 100 * seen.resident_share} | _row(fleet, load, seen))
    return rows


def _connections(rate: float, seed: int) -> list[dict[str, Any]]:
    rows = []
    for connections in (1, 2, 4, 8, 16):
        fleet = Fleet(100, 30, MEASURED, _PAGE, connections=connections, pod_cores=8)
        load = chat(rate)
        row = {"connections": connections, "links/node": fleet.links_per_node, "pages in flight": fleet.pages_in_flight}
        rows.append(row | _row(fleet, load, _run(fleet, load, seed)))
    return rows


def _files(pods: Sequence[int], rate: float, seed: int) -> list[dict[str, Any]]:
    rows = []
    for page in (_PAGE // 16, _PAGE):
        for count in pods:
            # One server of names, 8 of data with 100 Gbit/s each.
            fleet, load = Fleet(count, 8, FILES, page, meta=1), chat(rate, page)
            row = {"page MiB": page / (1 << 20), "pods": count, "requests/s": count * rate}
            rows.append(row | _row(fleet, load, _run(fleet, load, seed)))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, nargs="+", default=[10, 30, 100, 300])
    parser.add_argument("--nodes", type=int, nargs="+", default=[3, 10, 30, 100])
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second of each pod")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=1, help="for `make bench`: the same seed gives the same figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    tables = {
        "pods on a Redis Cluster": _sizes(options.pods, options.nodes, options.rate, options.seed),
        "page sizes, 100 pods on 30 nodes": _page_sizes(options.rate, options.seed),
        "common heads, 100 pods on 30 nodes": _heads(options.rate, options.seed),
        "connections, 100 pods with 8 cores on 30 nodes": _connections(options.rate, options.seed),
        "pods on a shared file system, 1 server of names and 8 of data": _files(
            options.pods, options.rate, options.seed
        ),
    }
    for title, rows in tables.items():
        print_table(f"{title}; {options.rate} requests/s by pod, simulated", rows)
    rows = [{"table": title, **row} for title, some in tables.items() for row in some]
    write_json(options.json, "scaling", rows, rate=options.rate, seed=options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
