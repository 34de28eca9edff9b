"""Writes at a multiple of L3's speed, and prefetches beside them: what the service does under that pressure.

    python benchmarks/write_pressure.py [--seconds 60] [--mib-per-s 32] [--times 2]

A real service has its pages in a Redis behind a proxy that passes so many bytes a second, both directions together:
what writes take, reads do not have. First only prefetches run, then engines write beside them at so many times that
speed; what gets no slot they do not write. Every prefetch reads all its pages from L3. At the end every page that was
reported durable is read from Redis, past the proxy, and compared byte by byte.

What is over is remembered for some seconds only, so that memory has had time to come to its limit.

Prints how much memory the service has (resident and its own, without the pool), how many slots are dirty, what became
of the pages asked to write, and how long prefetches take by size: alone, and beside the writes.
"""

import argparse
import hashlib
import random
import re
import statistics
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from _support import add_options, print_table, redis_at, run_async, through_storage, write_json
from forestage.config import load
from forestage.core.layout import ModelLayout
from forestage.storage.redis import RedisStorage
from forestage_client import Client
from forestage_client.pool_view import PoolView
from support.running import Running, running
from support.slow_link import slow_link

__all__: list[str] = []

PAGE_BYTES = 256 << 10
SLOTS = 512
SIZES = (1, 4, 16, 64)  # pages of a prefetch
WRITE_PAGES = 32
PREFIXES = 16  # of the largest size: more than the pool has room for
WRITERS = 4

CONFIG = """
[server]
port = 0
[pool]
path = "{folder}/pool"
bytes = "160MiB"
pin = "none"
write_reserve = 0.1
[prefetch]
keep_done_ms = 5000
[writes]
keep_done_ms = 15000
[storage]
kind = "redis"
[storage.redis]
url = "redis://127.0.0.1:{port}/0"
[[models]]
name = "m"
page_tokens = 64
[[models.components]]
name = "kv"
bytes = {page_bytes}
slots = {slots}
"""


def chain(name: str, length: int) -> list[bytes]:
    return [hashlib.sha256(f"{name}|{page}".encode()).digest() for page in range(length)]


def page_of(key: bytes) -> bytes:
    """Return the bytes of a page."""
    return key * (PAGE_BYTES // len(key))


def rss_kib(pid: int) -> int:
    """Return the memory of a process that is its own."""
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1])  # type: ignore[index]


def slope(points: list[tuple[float, float]]) -> float:
    """Return by how much a second they rise, by least squares."""
    return statistics.linear_regression(*zip(*points, strict=True)).slope


class Prefetches:
    """Prefetches one after another, all of pages that are in L3 only; `seconds` by size."""

    def __init__(self, url: str, prefixes: list[list[bytes]]) -> None:
        self._client = Client(url, timeout_s=60)
        self._prefixes = deque(prefixes)
        self.seconds: dict[int, list[float]] = {size: [] for size in SIZES}

    def run(self, seconds: float) -> None:
        rng, end = random.Random(0), time.monotonic() + seconds
        while time.monotonic() < end:
            for size in SIZES:
                self._one(size)
                time.sleep(rng.uniform(0, 0.1))

    def _one(self, size: int) -> None:
        # A part of each prefix at a time, so that nothing of it has been used since the last time round.
        prefix = self._prefixes[0]
        self._prefixes.rotate(-1)
        keys = prefix[:size]
        begin = time.monotonic()
        job = self._client.prefetch("m", keys, wait_ms=60_000, lease_ms=1000)
        took = time.monotonic() - begin
        if job.loaded == size:
            self.seconds[size].append(took)
        self._client.cancel(job.request_id)
        self._client.evict("m", keys)  # the next to go


class Writers:
    """Engines that want to write at a given speed. `durable` are the keys of writes of which L3 has every page."""

    def __init__(self, url: str, pool: str, bytes_per_s: float) -> None:
        self._url = url
        self._view = PoolView(pool, writable=True)
        self._every_s = WRITE_PAGES * PAGE_BYTES * WRITERS / bytes_per_s
        self._over = threading.Event()
        self._open: deque[tuple[str, list[bytes]]] = deque()
        self._threads = [threading.Thread(target=self._write, args=(number,)) for number in range(WRITERS)]
        self._threads.append(threading.Thread(target=self._watch))
        self.pages: Counter[str] = Counter()
        self.durable: list[bytes] = []
        self.failures: list[Exception] = []
        self.commit_s: list[float] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._view.close()

    def _write(self, number: int) -> None:
        begin, done = time.monotonic() + number * self._every_s / WRITERS, 0
        with self._failing(), Client(self._url, timeout_s=60) as client:
            while not self._over.wait(max(0.0, begin + done * self._every_s - time.monotonic())):
                keys = chain(f"written {number} {done}", WRITE_PAGES)
                done += 1
                with client.write(self._view, "m", keys) as writer:
                    for _, page in writer.untouched:
                        writer.put("kv", page, page_of(keys[page]))
                    begin_commit = time.monotonic()
                self.commit_s.append(time.monotonic() - begin_commit)
                self.pages["asked"] += WRITE_PAGES
                self.pages["granted"] += writer.write.granted
                if writer.write.reason is not None:
                    self.pages[writer.write.reason] += WRITE_PAGES - writer.write.granted
                if writer.write.granted:
                    self._open.append((writer.write.id, keys[: writer.write.granted]))

    def _watch(self) -> None:
        with self._failing(), Client(self._url, timeout_s=60) as client:
            while self._open or any(thread.is_alive() for thread in self._threads[:-1]):
                if not self._open:
                    time.sleep(0.01)
                    continue
                write_id, keys = self._open[0]
                status = client.write_status(write_id, wait_ms=1000)
                if status.settled:
                    self._open.popleft()
                    self.pages["durable"] += status.durable
                    self.pages["lost"] += status.failed
                    if not status.failed and not status.duplicate:
                        self.durable += keys

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failures.append(error)
            self._over.set()


class Watcher(threading.Thread):
    """Looks at the service twice a second: (seconds, KiB of memory), and dirty slots."""

    def __init__(self, service: Running) -> None:
        super().__init__()
        self._service = service
        self.over = threading.Event()
        self.memory: list[tuple[float, float]] = []
        self.dirty: list[int] = []

    def run(self) -> None:
        begin = time.monotonic()
        with Client(self._service.url) as client:
            while not self.over.wait(0.5):
                self.memory.append((time.monotonic() - begin, rss_kib(self._service.process.pid)))
                found = re.search(r'pool_slots{.*state="dirty"} (\S+)', client.metrics())
                assert found is not None
                self.dirty.append(int(float(found[1])))


async def put(url: str, layout: ModelLayout, prefixes: list[list[bytes]]) -> None:
    """Store the pages that prefetches read."""
    storage = RedisStorage(url)
    await storage.open()
    for prefix in prefixes:
        for key in prefix:
            await storage.write(layout, 0, key, [page_of(key)])
    await storage.aclose()


async def check(url: str, layout: ModelLayout, keys: list[bytes]) -> None:
    """Read pages back and compare every byte of them."""
    storage = RedisStorage(url)
    await storage.open()
    views = [memoryview(bytearray(PAGE_BYTES)) for _ in range(64)]
    for at in range(0, len(keys), len(views)):
        part = keys[at : at + len(views)]
        await through_storage(storage, layout, part, views[: len(part)])
        for key, view in zip(part, views, strict=False):
            if view != page_of(key):
                raise RuntimeError(f"page {key.hex()} has other bytes than were written")
    await storage.aclose()


def in_ms(seconds: list[float], reduce: Callable[[list[float]], float]) -> float:
    return 1e3 * reduce(seconds) if seconds else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="under writes; a third of it alone before")
    parser.add_argument("--mib-per-s", type=float, default=32, help="of L3, both directions together")
    parser.add_argument("--times", type=float, default=2, help="so many times that speed engines want to write")
    add_options(parser, repeat=1)
    args = parser.parse_args()
    rate = args.mib_per_s * (1 << 20)
    prefixes = [chain(f"stored {number}", max(SIZES)) for number in range(PREFIXES)]
    with (
        tempfile.TemporaryDirectory(prefix="forestage-bench-", dir="/dev/shm") as name,
        redis_at(unix=False) as redis,
        slow_link(redis.port, rate) as port,
    ):
        folder = Path(name)
        config = folder / "forestage.toml"
        config.write_text(CONFIG.format(folder=folder, port=port, page_bytes=PAGE_BYTES, slots=SLOTS))
        (layout,) = load(str(config), {}).layouts()
        run_async(put(redis.url, layout, prefixes))
        with running(config) as service:
            alone, beside = Prefetches(service.url, prefixes), Prefetches(service.url, prefixes)
            alone.run(args.seconds / 3)
            watcher = Watcher(service)
            watcher.start()
            with Writers(service.url, f"{folder}/pool", args.times * rate) as writers:
                beside.run(args.seconds)
                watcher.over.set()
            watcher.join()
            if writers.failures:
                raise writers.failures[0]
            if service.stop() != 0:
                raise RuntimeError("the service did not stop in good order")
        run_async(check(redis.url, layout, writers.durable))

    rows = []
    for size in SIZES:
        idle, busy = alone.seconds[size], beside.seconds[size]
        median_ms = in_ms(idle, statistics.median)
        rows.append(
            {
                "pages": size,
                "alone ms": [1e3 * s for s in idle],
                "beside writes ms": [1e3 * s for s in busy],
                "ratio of medians": in_ms(busy, statistics.median) / median_ms,
                "95th to median": in_ms(busy, lambda s: statistics.quantiles(s, n=20)[-1]) / median_ms,
                "worst to worst": in_ms(busy, max) / in_ms(idle, max),
                "worst to median": in_ms(busy, max) / median_ms,
            }
        )
    print_table(f"prefetches, L3 of {args.mib_per_s:g} MiB/s, writes at {args.times:g} times that", rows)
    late = [point for point in watcher.memory if point[0] > args.seconds / 2]
    quarters = [watcher.memory[part * (len(watcher.memory) - 1) // 4][1] for part in range(5)]
    summary = {
        "seconds": args.seconds,
        "KiB at each quarter": " ".join(f"{kib:.0f}" for kib in quarters),
        "KiB/s in the second half": slope(late),
        "most dirty slots": max(watcher.dirty),
        "of": SLOTS,
        "commit ms": [1e3 * s for s in writers.commit_s],
    }
    print_table("service", [summary])
    names = ("asked", "granted", "back_pressure", "host_capacity", "durable", "lost")
    pages = {name: writers.pages[name] for name in names}
    written = writers.pages["durable"] * PAGE_BYTES / (1 << 20) / args.seconds
    print_table(f"pages; {len(writers.durable)} durable ones compared byte by byte", [{**pages, "MiB/s": written}])
    write_json(
        args.json, "write_pressure", [*rows, summary, pages], memory=watcher.memory, **vars(args) | {"json": None}
    )


if __name__ == "__main__":
    main()
