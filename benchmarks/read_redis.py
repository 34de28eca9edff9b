"""Measure Redis -> slot memory through the storage, beside the floor and beside redis-py.

    python benchmarks/read_redis.py [--mib 1024] [--repeat 7] [--pages 64 256 1024 4096] [--on tcp unix] [--json FILE]

Interleaved in one run, over the same values (payload, then the trailer of the value format):
  drain     a blocking socket, pipelined GETs in the same window, all replies into one scratch buffer: nothing parsed,
            checked or kept
  bare      the same loop, but every payload into its slot: what one thread can do at most when pages are to be kept
  redis-py  asyncio client with hiredis, MGET and pipelined GET of the same bytes a call, each value copied to its slot
  storage   `RedisStorage.read_into`: every page into its slot, envelope and checksum verified
Shown are GB/s of payload (median, spread), client CPU seconds per GiB, and the median ratios of storage to the others.
"""

import argparse
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from _support import (
    PREFIX,
    Drain,
    Sample,
    add_options,
    fill,
    make_keys,
    make_model,
    memory,
    print_progress,
    print_table,
    redis_at,
    run_async,
    stored_names,
    through_storage,
    timed,
    value_bytes,
    write_json,
)
from forestage.config.schema import RedisConfig
from forestage.core.layout import ModelLayout
from forestage.storage.redis import RedisStorage, useful_connections
from forestage.storage.redis.storage import IN_FLIGHT_BYTES
from support.redis_servers import RedisServer

GIB = 1 << 30


class _Bare(Drain):
    """Pages into their slots, and nothing else done."""

    def __init__(
        self, server: RedisServer, names: Sequence[bytes], value_bytes: int, window: int, views: Sequence[memoryview]
    ) -> None:
        super().__init__(server, names, value_bytes, window)
        self._views = views
        self._head = memoryview(bytearray(len(b"$%d\r\n" % value_bytes)))
        self._end = memoryview(bytearray(value_bytes + 2 - len(views[0])))

    def run(self) -> None:
        """Read all once."""
        sock, head, end = self._sock, self._head, self._end
        self._sent = 0
        for at, view in enumerate(self._views):
            self._ask(at)
            sock.recv_into(head, 0, socket.MSG_WAITALL)
            # What lies between two payloads comes with the first of them.
            wanted, got = len(view) + len(end), 0
            while got < wanted:
                buffers = [view[got:], end] if got < len(view) else [end[got - len(view) :]]
                got += sock.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]


class _RedisPy:
    """What one would write without the storage."""

    def __init__(self, server: RedisServer, names: Sequence[bytes], views: Sequence[memoryview], batch: int) -> None:
        self._client = Redis.from_url(server.url, protocol=2)
        self._batches = [
            (names[first : first + batch], views[first : first + batch]) for first in range(0, len(names), batch)
        ]

    async def mget(self) -> None:
        for names, views in self._batches:
            _copy(await self._client.mget(names), views)

    async def pipeline(self) -> None:
        for names, views in self._batches:
            pipe = self._client.pipeline(transaction=False)
            for name in names:
                pipe.get(name)
            _copy(await pipe.execute(), views)

    async def close(self) -> None:
        await self._client.aclose()


def _copy(values: Sequence[Any], views: Sequence[memoryview]) -> None:
    for value, view in zip(values, views, strict=True):
        view[:] = memoryview(value)[: len(view)]


async def _timed(work: Any) -> Sample:
    cpu, begin = time.process_time(), time.perf_counter()
    await work
    return Sample(time.perf_counter() - begin, time.process_time() - cpu)


async def _measure(
    server: RedisServer, model: ModelLayout, total: int, repeat: int, connections: int, window: int, batch: int
) -> dict[str, list[Sample]]:
    page = model.components[0].bytes
    keys = make_keys(total // page)
    names = stored_names(model, keys)
    await fill(server, model, keys)
    pool = memory(total)
    views = [pool[at : at + page] for at in range(0, total, page)]
    storage = RedisStorage(server.url, prefix=PREFIX, connections=connections)
    if batch:
        storage.batch_bytes = batch
    await storage.open()
    drain = Drain(server, names, value_bytes(model), window)
    other = _RedisPy(server, names, views, max(1, storage.batch_bytes // page))
    bare = _Bare(server, names, value_bytes(model), window, views)
    samples: dict[str, list[Sample]] = {"drain": [], "bare": [], "mget": [], "pipeline": [], "storage": []}
    for turn in range(repeat + 1):
        measured = {
            "drain": timed(drain.run),
            "bare": timed(bare.run),
            "mget": await _timed(other.mget()),
            "pipeline": await _timed(other.pipeline()),
            "storage": await _timed(through_storage(storage, model, keys, views)),
        }
        if turn:  # the first is for warming up
            for name, sample in measured.items():
                samples[name].append(sample)
    if any(view[:32] != key for view, key in zip(views, keys, strict=True)):
        raise RuntimeError("a page lies where another one belongs")
    drain.close()
    bare.close()
    await other.close()
    await storage.aclose()
    return samples


def _row(on: str, page: int, total: int, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    rates = {name: [total / sample.seconds / 1e9 for sample in of] for name, of in samples.items()}
    cpu = {name: statistics.median(sample.cpu_s for sample in of) * GIB / total for name, of in samples.items()}
    best = max(("mget", "pipeline"), key=lambda name: statistics.median(rates[name]))
    over = {
        name: statistics.median(a / b for a, b in zip(rates["storage"], rates[name], strict=True))
        for name in ("drain", "bare", best)
    }
    return {
        "on": on,
        "page KiB": page >> 10,
        "drain GB/s": rates["drain"],
        "bare GB/s": rates["bare"],
        "redis-py GB/s": rates[best],
        "by": best,
        "storage GB/s": rates["storage"],
        "/drain": over["drain"],
        "/bare": over["bare"],
        "/redis-py": over[best],
        "cpu s/GiB: drain": cpu["drain"],
        "redis-py": cpu[best],
        "storage": cpu["storage"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="MiB of pages, for every row")
    parser.add_argument("--pages", type=int, nargs="+", default=[64, 256, 1024, 4096], help="page sizes in KiB")
    parser.add_argument("--on", nargs="+", choices=("tcp", "unix"), default=["tcp", "unix"])
    parser.add_argument(
        "--connections", type=int, default=useful_connections(RedisConfig().connections), help="default: as the service"
    )
    parser.add_argument(
        "--window", type=int, default=IN_FLIGHT_BYTES, help="bytes of replies due at once, for the drain"
    )
    parser.add_argument("--batch", type=int, default=0, help="bytes a batch, 0: the default of the storage")
    add_options(parser)
    options = parser.parse_args()
    try:
        import hiredis  # noqa: F401  (redis-py uses it when it is there)
    except ImportError:
        print("redis-py is to be measured with hiredis: pip install hiredis", file=sys.stderr)
        return 2
    total = options.mib << 20
    rows = []
    for on in options.on:
        for kib in options.pages:
            with redis_at(unix=on == "unix") as server:
                model = make_model(kib << 10)
                measured = _measure(
                    server, model, total, options.repeat, options.connections, options.window, options.batch
                )
                rows.append(_row(on, kib << 10, total, run_async(measured)))
                print_progress(rows[-1])
    title = f"Redis -> memory, {options.mib} MiB a row, median of {options.repeat} (lowest-highest)"
    print_table(title, rows)
    write_json(options.json, "read_redis", rows, mib=options.mib, repeat=options.repeat)
    return 0


if __name__ == "__main__":
    sys.exit(main())
