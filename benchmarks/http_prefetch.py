"""Measure prefetches over HTTP: from the request to the answer that all pages are in the pool.

    python benchmarks/http_prefetch.py [--mib 64] [--repeat 15] [--health-rounds 40] [--on tcp unix] [--json FILE]

A real `forestage serve` over a real Redis, one keep-alive connection, JSON bodies.
  cold      the pool has room for one of two prefixes that are fetched in turn, so every page comes from Redis, into a
            slot that held another; beside it, in the same run, a raw drain of the same values: nothing parsed or kept
  health    `/healthz` every 2 ms while cold prefetches follow one another
  resident  every page is in the pool; beside it an empty FastAPI route that is sent the same body
Shown are milliseconds (median, spread).
"""

import argparse
import http.client
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _support import (
    PREFIX,
    Drain,
    add_options,
    fill,
    make_keys,
    make_model,
    print_table,
    redis_at,
    run_async,
    stored_names,
    timed,
    value_bytes,
    write_json,
)
from forestage.storage.redis.storage import IN_FLIGHT_BYTES
from support.redis_servers import RedisServer

_CONFIG = """
[server]
port = 0
[pool]
path = "{folder}/pool"
bytes = "{pool}"
pin = "none"
[storage]
kind = "redis"
[storage.redis]
url = "{url}"
prefix = "{prefix}"
[prefetch]
max_inflight_fraction = 1.0
[[models]]
name = "bench"
page_tokens = 64
[[models.components]]
name = "kv"
bytes = {page}
slots = {slots}
"""


class _Caller:
    """One keep-alive connection."""

    def __init__(self, url: str) -> None:
        self.url = url
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=60)
        self._connection.connect()

    def post(self, body: bytes) -> tuple[float, dict[str, Any]]:
        """Send a prefetch; return the milliseconds until the whole answer is there, and the answer."""
        begin = time.perf_counter()
        self._connection.request("POST", "/v1/prefetch", body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        content = answer.read()
        spent = (time.perf_counter() - begin) * 1e3
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {content[:200]!r}")
        return spent, json.loads(content)

    def delete(self, request_id: str) -> None:
        self._connection.request("DELETE", f"/v1/prefetch/{request_id}")
        self._connection.getresponse().read()

    def healthy(self) -> float:
        """Return how many milliseconds `/healthz` takes."""
        begin = time.perf_counter()
        self._connection.request("GET", "/healthz")
        answer = self._connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise RuntimeError(f"/healthz: {answer.status}")
        return (time.perf_counter() - begin) * 1e3

    def close(self) -> None:
        self._connection.close()


@contextmanager
def _process(*command: str) -> Iterator[str]:
    """Run a server that prints its URL within the first line; it is ended at the end."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().split()
        yield next(word for word in line if word.startswith("http://"))
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def _service(server: RedisServer, page: int, slots: int) -> Iterator[_Caller]:
    with tempfile.TemporaryDirectory(prefix="forestage-bench-", dir="/dev/shm") as folder:
        pool = page * slots + (16 << 20)
        text = _CONFIG.format(folder=folder, pool=pool, url=server.url, prefix=PREFIX, page=page, slots=slots)
        config = Path(folder, "forestage.toml")
        config.write_text(text)
        with _process("-m", "forestage", "serve", "--config", str(config), "--log-level", "error") as url:
            caller = _Caller(url)
            yield caller
            caller.close()


def _body(keys: Sequence[bytes]) -> bytes:
    return json.dumps({"model": "bench", "keys": [key.hex() for key in keys], "wait_ms": 30_000}).encode()


def _fetch(caller: _Caller, body: bytes, loaded: int, ready: int) -> float:
    spent, answer = caller.post(body)
    if (answer["loaded"], answer["pages"]["ready"]) != (loaded, ready):
        raise RuntimeError(f"not what was to be measured: {answer['pages']} {answer['shortfall']} {answer['loaded']}")
    caller.delete(answer["request_id"])
    return spent


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def _cold(on: str, page: int, total: int, repeat: int, health_rounds: int) -> dict[str, Any]:
    count = total // page
    # The layout must be the service's own: its fingerprint is part of the names.
    model = make_model(page)
    chains = [make_keys(count, chain) for chain in (0, 1)]
    with redis_at(unix=on == "unix") as server:
        for keys in chains:
            run_async(fill(server, model, keys))
        drain = Drain(server, stored_names(model, chains[0]), value_bytes(model), IN_FLIGHT_BYTES)
        bodies = itertools.cycle([_body(keys) for keys in chains])
        with _service(server, page, count) as caller:
            drained: list[float] = []
            fetched: list[float] = []
            for turn in range(repeat + 2):
                floor = timed(drain.run).seconds * 1e3
                spent = _fetch(caller, next(bodies), count, count)
                if turn > 1:  # the first two are for warming up
                    drained.append(floor)
                    fetched.append(spent)
            health = _watch(caller, bodies, count, health_rounds)
        drain.close()
    extra = (1.5, 10.0) if page < 1 << 20 else (1.3, 3.0)
    allowed = statistics.median(drained) * extra[0] + extra[1]
    return {
        "on": on,
        "pages": f"{count} x {page >> 10} KiB",
        "drain ms": drained,
        "prefetch ms": fetched,
        "ratio": statistics.median(a / b for a, b in zip(fetched, drained, strict=True)),
        "allowed ms": allowed,
        "health p50": _percentile(health, 0.5),
        "p99": _percentile(health, 0.99),
        "max": max(health),
        "probes": len(health),
    }


def _watch(caller: _Caller, bodies: Iterator[bytes], count: int, rounds: int) -> list[float]:
    """Return what `/healthz` took while cold prefetches followed one another."""
    prober = _Caller(caller.url)
    stop = threading.Event()
    spans: list[float] = []

    def probe() -> None:
        while not stop.wait(0.002):
            spans.append(prober.healthy())

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        for _ in range(rounds):
            _fetch(caller, next(bodies), count, count)
    finally:
        stop.set()
        thread.join()
        prober.close()
    return spans


def _resident(count: int, repeat: int) -> dict[str, Any]:
    page = 4096
    model = make_model(page)
    keys = make_keys(count)
    body = _body(keys)
    floor: list[float] = []
    warm: list[float] = []
    with (
        redis_at(unix=False) as server,
        _service_of(server, model.components[0].bytes, count, keys) as caller,
        _process(str(Path(__file__).with_name("_empty_app.py"))) as url,
    ):
        empty = _Caller(url)
        for turn in range(repeat + 5):
            nothing = empty.post(body)[0]
            spent = _fetch(caller, body, 0, count)
            if turn >= 5:
                floor.append(nothing)
                warm.append(spent)
        empty.close()
    return {
        "resident pages": count,
        "body KiB": len(body) >> 10,
        "empty POST ms": floor,
        "prefetch ms": warm,
        "more ms": statistics.median(a - b for a, b in zip(warm, floor, strict=True)),
    }


@contextmanager
def _service_of(server: RedisServer, page: int, count: int, keys: Sequence[bytes]) -> Iterator[_Caller]:
    """Run a service with all pages in its pool."""
    run_async(fill(server, make_model(page), keys))
    with _service(server, page, count) as caller:
        _fetch(caller, _body(keys), count, count)
        yield caller


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="MiB of a cold prefetch")
    parser.add_argument("--pages", type=int, nargs="+", default=[64, 1024], help="page sizes in KiB")
    parser.add_argument("--on", nargs="+", choices=("tcp", "unix"), default=["tcp", "unix"])
    parser.add_argument("--resident", type=int, nargs="*", default=[1024, 2048], help="pages of resident prefixes")
    parser.add_argument("--health-rounds", type=int, default=40)
    add_options(parser, repeat=15)
    options = parser.parse_args()
    cold = [
        _cold(on, kib << 10, options.mib << 20, options.repeat, options.health_rounds)
        for on in options.on
        for kib in options.pages
    ]
    if cold:
        print_table(f"{options.mib} MiB cold from Redis, median of {options.repeat} (lowest-highest)", cold)
    resident = [_resident(count, 10 * options.repeat) for count in options.resident]
    if resident:
        print_table(f"resident, median of {10 * options.repeat} (lowest-highest)", resident)
    write_json(options.json, "http_prefetch", [*cold, *resident], mib=options.mib, repeat=options.repeat)
    return 0


if __name__ == "__main__":
    sys.exit(main())
