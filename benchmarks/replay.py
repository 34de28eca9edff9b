"""Play a trace of requests against a real service over files and over Redis, with pools from small to large.

    python benchmarks/replay.py [--trace FILE] [--requests 250] [--speed 60] [--percent 2 10 50] [--ahead 0 100]
                                [--stores file redis] [--page-bytes 16384] [--json FILE] [--plots FOLDER]

Every request is one prefetch of all its pages (one block of the trace each, scaled down to --page-bytes), sent when its
time comes, `speed` times as fast as in the trace; its lease is released when the answer is there. L3 holds every page.
With `ahead` N a router names each prefix N requests before it comes (`expect`, POST /v1/hints).

  ready     pages that were ready, of those asked for: less than all where a prompt does not fit
  hits      leading pages that were in the pool already, of all asked for (`host`), then the same for an offline
            optimum (Belady) and for plain LRU, page by page, with as many pages, on the same requests one after another
  MiB       read from L3
  used      prefetched pages that somebody wanted again or consumed; `unused` ones left the pool unseen
  p50, p99  milliseconds from arrival to the end of a job, by the service's own clock
  wait      seconds that engines would have waited for L3, all requests together, had the prefetch begun so many
            milliseconds before the engine needed the pages: the sum of what each job took beyond that
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2

from _plots import plot_lines
from _policies import POLICIES, hits_of
from _support import PREFIX, make_model, print_progress, print_table, redis_at, write_json
from _trace import Request, add_trace_options, load_trace, unique_pages
from forestage.storage.base import Storage
from forestage.storage.files import FileStorage
from forestage.storage.redis import RedisStorage
from forestage_client import AsyncClient, Prefetch

_LEADS_MS = (0, 50, 500)
_CONFIG = """
[server]
port = 0
[pool]
path = "{folder}/pool"
bytes = "{pool}"
pin = "none"
[storage]
{storage}
[lease]
default_ms = 10000
[[models]]
name = "bench"
page_tokens = 64
[[models.components]]
name = "kv"
bytes = {page}
slots = {slots}
"""


class _Run:
    """One service that plays the requests once."""

    def __init__(self, url: str, requests: Sequence[Request], speed: float, ahead: int) -> None:
        self._url = url
        self._requests = requests
        self._speed = speed
        self._ahead = ahead
        self.jobs: list[Prefetch] = []

    async def play(self) -> dict[str, float]:
        """Play all requests at their times; return what the service counted."""
        async with AsyncClient(self._url, timeout_s=60.0) as client, httpx2.AsyncClient(base_url=self._url) as raw:
            for request in self._requests[: self._ahead]:
                await self._expect(raw, request)
            begin, first = time.perf_counter(), self._requests[0].at_ms
            async with asyncio.TaskGroup() as group:
                for number, request in enumerate(self._requests):
                    due = begin + (request.at_ms - first) / 1e3 / self._speed
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                    if self._ahead and number + self._ahead < len(self._requests):
                        # Beside the requests, not before them: bursts stay as they are.
                        group.create_task(self._expect(raw, self._requests[number + self._ahead]))
                    group.create_task(self._serve(client, number, request))
            return _counters(await client.metrics())

    async def _serve(self, client: AsyncClient, number: int, request: Request) -> None:
        name = f"r{number}"
        self.jobs.append(await client.prefetch("bench", request.keys, request_id=name, wait_ms=30_000))
        await client.cancel(name)

    async def _expect(self, raw: httpx2.AsyncClient, request: Request) -> None:
        payload = {"model": "bench", "keys": [key.hex() for key in request.keys], "ttl_ms": 600_000}
        action = {"action_id": "a", "action_type": "expect", "action_version": "1.0", "payload": payload}
        answer = await raw.post("/v1/hints", json={"protocol_version": "1.0", "message_id": "", "actions": [action]})
        if answer.status_code != 200 or answer.json()["actions"][0]["outcome"] == "rejected":
            raise RuntimeError(f"{answer.status_code}: {answer.text[:200]}")


def _counters(metrics: str) -> dict[str, float]:
    """Sum the samples of each counter over its labels, but for the fate of pages."""
    found: dict[str, float] = {}
    for line in metrics.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name if "fate" in name else name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


@contextmanager
def _service(storage: str, page: int, slots: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="forestage-replay-", dir="/dev/shm") as folder:
        pool = (page + 4096) * slots + (1 << 20)
        config = Path(folder, "forestage.toml")
        config.write_text(_CONFIG.format(folder=folder, pool=pool, storage=storage, page=page, slots=slots))
        command = [sys.executable, "-m", "forestage", "serve", "--config", str(config), "--log-level", "error"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline().split()
            yield next(word for word in line if word.startswith("http://"))
        finally:
            process.terminate()
            process.wait(20)


@asynccontextmanager
async def _store(kind: str, requests: Sequence[Request], page: int) -> AsyncIterator[str]:
    """Have an L3 with every page that is asked for; yields its configuration."""
    keys = list({key: None for request in requests for key in request.keys})
    if kind == "file":
        with tempfile.TemporaryDirectory(prefix="forestage-replay-") as root:
            await _put(FileStorage(root), keys, page)
            yield f'kind = "file"\n[storage.file]\nroot = "{root}"'
        return
    with redis_at(unix=False) as server:
        await _put(RedisStorage(server.url, prefix=PREFIX), keys, page)
        yield f'kind = "redis"\n[storage.redis]\nurl = "{server.url}"\nprefix = "{PREFIX}"'


async def _put(storage: Storage, keys: Sequence[bytes], page: int) -> None:
    model, block = make_model(page), os.urandom(page)
    await storage.open()
    for first in range(0, len(keys), 16):
        part = keys[first : first + 16]
        await asyncio.gather(*(storage.write(model, 0, key, [key + block[len(key) :]]) for key in part))
    await storage.aclose()


def _row(run: _Run, counted: dict[str, float], requests: Sequence[Request], slots: int) -> dict[str, Any]:
    prompts = [request.keys for request in requests]
    asked = sum(map(len, prompts))
    jobs = run.jobs
    if len(jobs) != len(requests) or any(not job.done for job in jobs):
        raise RuntimeError(f"{sum(job.done for job in jobs)} of {len(requests)} jobs are done")
    took = sorted(job.timing_ms["total"] for job in jobs)
    fate = {word: counted[f'forestage_prefetched_pages_fate_total{{fate="{word}"}}'] for word in ("used", "unused")}
    waits = {lead: sum(max(0.0, ms - lead) for ms in took) / 1e3 for lead in _LEADS_MS}
    return {
        "ready": f"{sum(job.pages.ready for job in jobs) / asked:.3f}",
        "hits": f"{sum(job.pages.host for job in jobs) / asked:.3f}",
        "Belady": f"{hits_of(POLICIES['Belady'](slots, prompts), prompts) / asked:.3f}",
        "LRU": f"{hits_of(POLICIES['LRU'](slots, prompts), prompts) / asked:.3f}",
        "MiB": round(counted["forestage_storage_read_bytes_total"] / 2**20, 1),
        "used": int(fate["used"]),
        "unused": int(fate["unused"]),
        "p50": round(statistics.median(took), 2),
        "p99": round(took[int(len(took) * 0.99)], 2),
        **{f"wait {lead}": f"{seconds:.3f}" for lead, seconds in waits.items()},
    }


async def _replay(args: argparse.Namespace, requests: Sequence[Request]) -> list[dict[str, Any]]:
    unique, rows = unique_pages(requests), []
    for kind in args.stores:
        async with _store(kind, requests, args.page_bytes) as storage:
            for percent in args.percent:
                slots = max(1, int(unique * percent / 100))
                for ahead in args.ahead:
                    with _service(storage, args.page_bytes, slots) as url:
                        run = _Run(url, requests, args.speed, ahead)
                        counted = await run.play()
                    named = {"L3": kind, "pool": f"{percent:g} %", "pages": slots, "ahead": ahead}
                    rows.append({**named, **_row(run, counted, requests, slots)})
                    print_progress(rows[-1])
    return rows


def _plot(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pools = list(dict.fromkeys(row["pool"] for row in rows))
    hits: dict[str, list[float]] = {}
    waits: dict[str, list[float]] = {}
    for row in rows:
        hits.setdefault(f"{row['L3']}, hints {row['ahead']} ahead", []).append(float(row["hits"]))
        for lead in _LEADS_MS:
            waits.setdefault(f"{row['L3']}, hints {row['ahead']}, lead {lead} ms", []).append(
                float(row[f"wait {lead}"])
            )
    first = [row for row in rows if row["L3"] == rows[0]["L3"] and row["ahead"] == rows[0]["ahead"]]
    for name in ("Belady", "LRU"):
        hits[name] = [float(row[name]) for row in first]
    below = "pool, of the unique pages"
    plot_lines(folder / "replay-hits.png", "leading pages in the pool when asked for, of all", pools, hits, below)
    plot_lines(folder / "replay-wait.png", "seconds of waiting for L3 left", pools, waits, below)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_trace_options(parser, 250)
    parser.add_argument("--speed", type=float, default=60.0, help="times as fast as the trace")
    parser.add_argument("--percent", type=float, nargs="+", default=[2, 10, 50], help="pool sizes, of the unique pages")
    parser.add_argument("--ahead", type=int, nargs="+", default=[0, 100], help="requests ahead that a router names")
    parser.add_argument("--stores", nargs="+", choices=["file", "redis"], default=["file", "redis"])
    parser.add_argument("--page-bytes", type=int, default=16384)
    parser.add_argument("--repeat", type=int, help="ignored: a trace is played once for each row")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw PNGs there, if matplotlib is installed")
    args = parser.parse_args()
    requests = load_trace(args)
    rows = asyncio.run(_replay(args, requests))
    source = args.trace.name if args.trace else "made up"
    pages = sum(len(request.keys) for request in requests)
    title = f"{len(requests)} requests ({source}) of {pages} pages, {unique_pages(requests)} unique, x{args.speed:g}"
    print_table(title, rows)
    settings = {"source": source, "speed": args.speed, "page_bytes": args.page_bytes, "requests": len(requests)}
    write_json(args.json, "replay", rows, **settings, python=json.dumps(sys.version_info[:3]))
    if args.plots:
        _plot(args.plots, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
