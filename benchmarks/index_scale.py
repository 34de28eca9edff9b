"""Measure the index of resident pages at two sizes: memory by page, lookup, lease, and eviction of one page.

    python benchmarks/index_scale.py [--small 10000] [--large 1000000] [--repeat 7] [--json FILE]

Only the core: `ModelPool` and `Leases` with all slots resident, no I/O, no shared memory.
  bytes     of process memory by resident page, keys of 32 bytes included, from an empty pool of the same capacity
  lookup    `survey` and `plan` of 512-page prefixes from all over the pool, nanoseconds by page
  lease     taking and releasing a lease on such a prefix, nanoseconds by page
  evict     room for one page in a full pool: evict, take the slot, fill and publish it, microseconds
Both sizes in turn in one process; shown are medians with spread, and the median ratio of large to small. The prefixes
at the small size fit into the caches of the processor, those at the large one do not: that is what is left in a ratio.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from _support import add_options, print_table, write_json
from forestage.core.layout import Component, ModelLayout
from forestage.core.leases import Leases
from forestage.core.model_pool import ModelPool
from forestage.core.timers import Timers

__all__ = ["Index", "ratios"]

_CHAIN = 512
_CALLS = 64  # of one sample


class _NoReaders:
    """Nobody mirrors the slots."""

    def begin_fill(self, slot: int, lent: bool = False) -> None: ...

    def publish(self, slot: int, key: bytes, page: int = 0, dirty: bool = False) -> None: ...

    def set_clean(self, slot: int) -> None: ...

    def clear(self, slot: int) -> None: ...


def _own_bytes() -> int:
    """Return the memory that is this process's own."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:"))


class Index:
    """A pool with so many resident pages, in chains."""

    def __init__(self, pages: int, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        layout = ModelLayout("bench", 64, (Component("kv", 64, slots=pages),))
        self.pool = ModelPool(layout, [pages], [_NoReaders()])
        timers: Timers[Callable[[float], None]] = Timers()
        self.leases = Leases({"bench": self.pool}, 600.0, timers)
        gc.collect()
        before = _own_bytes()
        self.pool.adopt(0, [(slot, self._rng.randbytes(32)) for slot in range(pages)])
        gc.collect()
        self.bytes_per_page = (_own_bytes() - before) / pages
        index = self.pool.index[0]
        keys = [index.key_of(slot) or b"" for slot in range(pages)]
        self.chains = [keys[at : at + _CHAIN] for at in range(0, pages - _CHAIN + 1, _CHAIN)]
        self._next = iter(self._fresh_keys())

    def _fresh_keys(self) -> Iterator[bytes]:
        while True:
            yield self._rng.randbytes(32)

    def lookup_ns(self) -> float:
        """Return the nanoseconds by page of looking prefixes up."""
        chains = self._some()
        begin = time.perf_counter_ns()
        for keys in chains:
            plan = self.pool.plan(self.pool.survey(keys, 0, None, loading=False))
            assert plan.granted == _CHAIN
        return (time.perf_counter_ns() - begin) / len(chains) / _CHAIN

    def lease_ns(self) -> float:
        """Return the nanoseconds by page of leasing prefixes and releasing them."""
        chains = self._some()
        begin = time.perf_counter_ns()
        for keys in chains:
            _, lease = self.leases.take("bench", keys, 0, 30.0, 0.0)
            assert lease is not None
            self.leases.release(lease.id)
        return (time.perf_counter_ns() - begin) / len(chains) / _CHAIN

    def evict_us(self) -> float:
        """Return the microseconds of making room for one page and putting it there."""
        pool, times = self.pool, 16 * _CALLS
        new = [next(self._next) for _ in range(times)]
        begin = time.perf_counter_ns()
        for key in new:
            slots = pool.begin_writes(0, 1)
            pool.commit_writes(0, {0: slots[0]}, [key])
            pool.set_clean(0, slots[0])
            pool.index[0].release(slots)
        return (time.perf_counter_ns() - begin) / times / 1e3

    def _some(self) -> Sequence[Sequence[bytes]]:
        # As a request brings them: objects of their own, whose hashes nobody knows yet.
        return [[bytes(memoryview(key)) for key in keys] for keys in self._rng.choices(self.chains, k=_CALLS)]


def ratios(large: Sequence[float], small: Sequence[float]) -> float:
    """Return the median ratio of samples that were taken in turn."""
    return statistics.median(a / b for a, b in zip(large, small, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=10_000)
    parser.add_argument("--large", type=int, default=1_000_000)
    add_options(parser)
    options = parser.parse_args()
    small, large = Index(options.small), Index(options.large)
    gc.freeze()  # as a service does not: so that no collection falls into one sample and not into another
    rows: list[dict[str, Any]] = [
        {
            "what": "bytes by page",
            "small": small.bytes_per_page,
            "large": large.bytes_per_page,
            "ratio": "",
            "target": 320,
        }
    ]
    for what, name, target in (
        ("lookup ns/page", "lookup_ns", 1.3),
        ("lease ns/page", "lease_ns", 1.3),
        ("evict us", "evict_us", 1.5),
    ):
        samples: dict[str, list[float]] = {"small": [], "large": []}
        for turn in range(options.repeat + 1):
            for size, index in (("small", small), ("large", large)):
                value = getattr(index, name)()
                if turn:  # the first one is for warming up
                    samples[size].append(value)
        rows.append({"what": what, **samples, "ratio": ratios(samples["large"], samples["small"]), "target": target})
    print_table(f"{options.small} and {options.large} resident pages, median of {options.repeat}", rows)
    write_json(options.json, "index_scale", rows, small=options.small, large=options.large, repeat=options.repeat)
    return 0


if __name__ == "__main__":
    sys.exit(main())
