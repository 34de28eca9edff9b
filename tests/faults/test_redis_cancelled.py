"""A read that is given up, and at once another one over the same connection: nobody gets another's bytes."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from forestage.core.layout import ModelLayout
from support.live import make_keys
from support.live_redis import LiveRedis, live_redis, name_of, until, value_of
from support.redis_stub import RedisStub

ROUNDS = 500
PAGE = 16 << 10
NUM_PAGES = 3
# When the first read is given up: at once, or so many seconds after the server was asked for its first page.
MOMENTS = (None, 0.0, 0.001)
# How the server treats the body of that page, or of the one behind it.
BODIES = ("delayed", "in small pieces", "held between two replies", "delayed, and the next one too")


def _store(stub: RedisStub, model: ModelLayout, keys: list[bytes]) -> None:
    stub.values.update({name_of(model, key): value_of(model, key) for key in keys})


def _script(stub: RedisStub, model: ModelLayout, keys: list[bytes], body: str) -> None:
    if body.startswith("delayed"):
        stub.on("GET", key=name_of(model, keys[0]), times=1, delay_s=0.006)
    if body == "held between two replies":
        stub.on("GET", key=name_of(model, keys[1]), times=1, delay_s=0.006)
    if body == "delayed, and the next one too":  # long enough for the next read to find nothing on the connection
        stub.on("GET", key=name_of(model, keys[1]), times=1, delay_s=0.03)
    if body == "in small pieces":
        value = value_of(model, keys[0])
        reply = b"$%d\r\n%b\r\n" % (len(value), value)
        pieces = [reply[at : at + 4096] for at in range(0, len(reply), 4096)]
        stub.on("GET", lambda _: iter(pieces), key=name_of(model, keys[0]), times=1, pace_s=0.0015)


async def _moment(stub: RedisStub, after_s: float | None) -> None:
    """Return at the moment when a read is to be given up."""
    if after_s is not None:
        await until(lambda: stub.count("GET") > 0, every_s=0.0005)
        await asyncio.sleep(after_s)


async def _give_up(
    live: LiveRedis, stub: RedisStub, keys: list[bytes], way: str, after_s: float | None, name: str
) -> None:
    """Begin a prefetch and end it in one of the ways in which callers do."""
    if way == "deadline":
        deadline_ms = 1 if after_s is None else 4
        answer = await live.ask(keys, request_id=name, deadline_ms=deadline_ms)
        await live.drop(answer.job)
        return
    if way == "delete":
        await live.client.prefetch("m", keys, request_id=name)
        await _moment(stub, after_s)
        await live.client.cancel(name)
        return
    waiting = asyncio.create_task(live.client.prefetch("m", keys, request_id=name, wait_ms=10_000))
    await asyncio.sleep(0)
    await _moment(stub, after_s)
    waiting.cancel()
    await asyncio.wait([waiting])


@asynccontextmanager
async def _one_connection(path: Path) -> AsyncIterator[tuple[LiveRedis, RedisStub]]:
    patient = {"probe_timeout_ms": 5000, "stall_timeout_ms": 5000, "redis": {"connections": 1}}
    with RedisStub() as stub:
        async with live_redis(path, stub.url, page_bytes=PAGE, storage=patient) as live:
            yield live, stub
            stub.heal()
            await live.quiet()
            # One reader, and at most what probes and writes have of their own.
            assert stub.open <= 1 + 2 + 2
            assert live.storage.num_links == stub.open


async def test_five_hundred_rounds(tmp_path: Path) -> None:
    ways = itertools.cycle(itertools.product(("delete", "deadline", "disconnect"), MOMENTS, BODIES))
    async with _one_connection(tmp_path) as (live, stub):
        for number in range(ROUNDS):
            way, after_s, body = next(ways)
            first, second = make_keys(NUM_PAGES, f"given up {number}"), make_keys(NUM_PAGES, f"wanted {number}")
            _store(stub, live.model, [*first, *second])
            _script(stub, live.model, first, body)
            stub.log.clear()
            await _give_up(live, stub, first, way, after_s, f"r{number}")
            answer = await live.ask(second)  # compares every byte
            assert answer.ready == NUM_PAGES, (number, way, after_s, body, answer)
            await live.drop(answer.job)
            stub.heal()
            stub.values.clear()
        assert await live.metric("storage_errors_total") == 0


async def test_two_hundred_random_ends(tmp_path: Path) -> None:
    """Several jobs at once, ended at random moments, beside others that go on."""
    chance = random.Random(17)
    async with _one_connection(tmp_path) as (live, stub):
        stub.on("GET", pace_s=0.0005)

        async def one(number: int) -> None:
            keys = make_keys(NUM_PAGES, f"random {number}")
            _store(stub, live.model, keys)
            if number % 4:
                await live.client.prefetch("m", keys, request_id=f"r{number}")
                await asyncio.sleep(chance.random() * 0.01)
                if number % 4 == 1:
                    await live.client.finish(f"r{number}")
                await live.client.cancel(f"r{number}")
                return
            answer = await live.ask(keys)
            assert answer.ready == NUM_PAGES, answer
            await live.drop(answer.job)

        for start in range(0, 200, 8):
            await asyncio.gather(*(one(number) for number in range(start, start + 8)))
        assert await live.metric("storage_errors_total") == 0
