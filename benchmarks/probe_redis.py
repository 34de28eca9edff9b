"""Measure how long it takes to ask Redis for the existence of many pages, beside one pipelined batch of redis-py.

    python benchmarks/probe_redis.py [--keys 4096] [--repeat 21] [--on tcp unix] [--json FILE]

Interleaved in one run, all keys stored, warm connections:
  sync      bare redis-py with hiredis, blocking: one pipeline of EXISTS, one a key
  asyncio   the same with the asyncio client
  storage   `RedisStorage.probe` of the same keys, up to the masks
Shown are milliseconds (median, spread) and the median ratio of storage to the faster one of the others.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import redis
import redis.asyncio

from _support import (
    PREFIX,
    add_options,
    fill,
    make_keys,
    make_model,
    print_table,
    redis_at,
    run_async,
    stored_names,
    write_json,
)
from forestage.core.layout import ModelLayout
from forestage.storage.base import Probe
from forestage.storage.redis import RedisStorage
from support.redis_servers import RedisServer


def _sync(client: redis.Redis, names: Sequence[bytes]) -> list[int]:
    pipe = client.pipeline(transaction=False)
    for name in names:
        pipe.exists(name)
    return list(pipe.execute())


async def _asyncio(client: redis.asyncio.Redis, names: Sequence[bytes]) -> list[int]:
    pipe = client.pipeline(transaction=False)
    for name in names:
        pipe.exists(name)
    return list(await pipe.execute())


async def _measure(server: RedisServer, model: ModelLayout, count: int, repeat: int) -> dict[str, list[float]]:
    keys = make_keys(count)
    names = stored_names(model, keys)
    await fill(server, model, keys)
    storage = RedisStorage(server.url, prefix=PREFIX)
    await storage.open()
    probe = Probe(keys, first_page=0, first_tail=0, known=bytes(count))
    samples: dict[str, list[float]] = {"sync": [], "asyncio": [], "storage": []}
    with redis.Redis.from_url(server.url, protocol=2) as blocking:
        async with redis.asyncio.Redis.from_url(server.url, protocol=2) as client:
            for turn in range(repeat + 2):
                times = [time.perf_counter()]
                answers = [_sync(blocking, names)]
                times.append(time.perf_counter())
                answers.append(await _asyncio(client, names))
                times.append(time.perf_counter())
                answers.append(list((await storage.probe(model, probe)).masks[0]))
                times.append(time.perf_counter())
                if any(answer != [1] * count for answer in answers):
                    raise RuntimeError("not every key was found")
                if turn > 1:  # the first two are for warming up
                    for name, begin, end in zip(samples, times, times[1:], strict=False):
                        samples[name].append((end - begin) * 1e3)
    await storage.aclose()
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=4096)
    parser.add_argument("--on", nargs="+", choices=("tcp", "unix"), default=["tcp", "unix"])
    add_options(parser, repeat=21)
    options = parser.parse_args()
    try:
        import hiredis  # noqa: F401  (redis-py uses it when it is there)
    except ImportError:
        print("redis-py is to be measured with hiredis: pip install hiredis", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    for on in options.on:
        with redis_at(unix=on == "unix") as server:
            samples = run_async(_measure(server, make_model(64), options.keys, options.repeat))
        best = min(("sync", "asyncio"), key=lambda name: statistics.median(samples[name]))
        ratio = statistics.median(a / b for a, b in zip(samples["storage"], samples[best], strict=True))
        rows.append({"on": on, "keys": options.keys, **{f"{k} ms": v for k, v in samples.items()}, "ratio": ratio})
    print_table(f"existence of {options.keys} keys, median of {options.repeat} (lowest-highest)", rows)
    write_json(options.json, "probe_redis", rows, keys=options.keys, repeat=options.repeat)
    return 0


if __name__ == "__main__":
    sys.exit(main())
