"""Hold the figures that benchmarks wrote against what was aimed at, in one table.

    python benchmarks/targets.py build/bench/*.json

`make bench` runs it last. Each line is one aim: what, the floor or the peer that it is held against, the ratio to that
or the figure itself, and the bound. What was not measured is not shown; `docs/performance.md` explains each line.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _support import print_table

__all__ = ["Aim", "aims"]

Row = Mapping[str, Any]


class Aim(NamedTuple):
    """One aim and what was measured of it; `figure` is to be at least `bound`, or at most if not `is_least`."""

    what: str
    floor: str
    figure: float
    bound: float
    is_least: bool

    @property
    def is_met(self) -> bool:
        """True when the figure, rounded as it is shown, is on the right side of the bound."""
        shown = round(self.figure, 2)
        return shown >= self.bound if self.is_least else shown <= self.bound

    def row(self) -> dict[str, Any]:
        """Return the line of the table."""
        aim = f"{'>=' if self.is_least else '<='} {self.bound:g}"
        met = "" if self.is_met else "MISSED"
        return {"what": self.what, "held against": self.floor, "measured": self.figure, "aim": aim, "": met}


def _middle(value: float | Sequence[float]) -> float:
    return value if isinstance(value, (int, float)) else statistics.median(value)


def _files(rows: Sequence[Row]) -> Iterator[Aim]:
    for row in rows:
        if row["kind"] != "file":
            continue
        kib = row["page KiB"]
        if row["read"] == "cold":
            yield Aim(f"files -> pool, cold, {kib} KiB", "dd iflag=direct", row["/plain"], 0.90, True)
        else:
            bound = 0.75 if kib < 256 else 0.92
            yield Aim(f"files -> pool, warm, {kib} KiB", "plain preadv", row["/plain"], bound, True)


def _redis(rows: Sequence[Row]) -> Iterator[Aim]:
    for row in rows:
        kib = row["page KiB"]
        what = f"Redis -> pool, {row['on']}, {kib} KiB"
        yield Aim(what, "raw drain of the same replies", row["/drain"], 0.85 if kib < 256 else 0.92, True)


def _http(rows: Sequence[Row]) -> Iterator[Aim]:
    for row in rows:
        if "resident pages" in row:
            pages = row["resident pages"]
            bound = {1024: 1.0, 2048: 1.8}.get(pages)
            if bound is not None:
                yield Aim(f"prefetch of {pages} resident pages, ms on top", "empty POST", row["more ms"], bound, False)
        elif row["pages"].endswith("x 64 KiB"):
            drain_ms = statistics.median(row["drain ms"])
            over = statistics.median(row["prefetch ms"]) - (1.25 * drain_ms + 5)
            yield Aim(f"{row['pages']} over HTTP, {row['on']}, ms above 1.25 x drain + 5", "raw drain", over, 0, False)


def _urgent(rows: Sequence[Row]) -> Iterator[Aim]:
    by_what = {row["what"]: row for row in rows}
    alone, beside, lag = (by_what.get(name) for name in ("16 pages alone", "16 pages beside", "loop late, 8 jobs"))
    if lag is not None:
        yield Aim("event loop lag p99, 8 jobs, ms", "-", lag["p99 ms"], 5, False)
    if alone is not None and beside is not None:
        ratio = beside["p99 ms"] / alone["p99 ms"]
        yield Aim("urgent job of 16 pages beside a large one, p99", "the same alone", ratio, 3, False)


def _index(rows: Sequence[Row]) -> Iterator[Aim]:
    for row in rows:
        if row["ratio"] == "":
            yield Aim("bytes by resident page, 1e6", "-", row["large"], row["target"], False)
        else:
            yield Aim(f"{row['what']}, 1e6 resident pages", "1e4", _middle(row["ratio"]), row["target"], False)


def _start(rows: Sequence[Row]) -> Iterator[Aim]:
    for row in rows:
        yield Aim("prefault of the pool", "memset by 2 threads", row["ratio"], row["target"], False)


def _idle(rows: Sequence[Row]) -> Iterator[Aim]:
    for row in rows:
        if row["target"] != "no":
            yield Aim(row["what"], "-", _middle(row["measured"]), row["target"], False)


_AIMS: Mapping[str, Callable[[Sequence[Row]], Iterator[Aim]]] = {
    "read_files": _files,
    "read_redis": _redis,
    "http_prefetch": _http,
    "urgent": _urgent,
    "index_scale": _index,
    "start": _start,
    "idle": _idle,
}


def aims(written: Sequence[Mapping[str, Any]]) -> list[Aim]:
    """Return what the files of several benchmarks say of the aims, in the order of the aims."""
    by_name = {one["benchmark"]: one["rows"] for one in written}
    return [aim for name, of in _AIMS.items() if name in by_name for aim in of(by_name[name])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="what benchmarks wrote with --json")
    options = parser.parse_args()
    found = aims([json.loads(path.read_text()) for path in options.files])
    print_table("aims", [aim.row() for aim in found])
    print(f"{sum(aim.is_met for aim in found)} of {len(found)} met")
    return 0


if __name__ == "__main__":
    sys.exit(main())
