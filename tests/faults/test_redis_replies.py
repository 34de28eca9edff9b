"""Replies that a real Redis does not give on demand, below a running service."""

import asyncio
import itertools
import resource
import statistics
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from faults.fault_table import FaultTable
from faults.redis_stock import PAGES, Chains, assert_degraded, assert_up
from support.live import make_keys
from support.live_redis import PAGE_BYTES, Answer, LiveRedis, live_redis, name_of, until, value_of
from support.redis_stub import RedisStub, Reply
from support.resp import array, bulk, error

PROBE_MS, STALL_MS, SLACK_MS = 400, 600, 300
LOADING = error("LOADING Redis is loading the dataset in memory")


@asynccontextmanager
async def _over_a_stub(
    path: Path, num_chains: int = 6, **storage: object
) -> AsyncIterator[tuple[LiveRedis, RedisStub, Chains]]:
    with RedisStub() as stub:
        async with live_redis(path, stub.url, storage=storage) as live:
            chains = Chains(num_chains)
            stub.values.update({name_of(live.model, key): value_of(live.model, key) for key in chains.keys})
            assert (await live.ask(chains())).ready == PAGES
            yield live, stub, chains
            stub.heal()
            await live.quiet()


async def test_loading_for_a_while(tmp_path: Path, fault_table: FaultTable) -> None:
    async with _over_a_stub(tmp_path) as (live, stub, chains):
        for command in ("EXISTS", "GET"):
            stub.on(command, LOADING)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + 1.0
        answers: list[Answer] = []
        while loop.time() < until_s:
            answers.append(await live.ask(make_keys(PAGES, f"absent {len(answers)}")))
            await asyncio.sleep(0.01)
        assert {tuple(one.shortfall.items()) for one in answers} == {(("storage_unavailable", PAGES),)}
        assert statistics.median(one.ms for one in answers) < SLACK_MS  # the machine may pause for longer
        assert max(one.ms for one in answers) < 10 * SLACK_MS
        assert stub.count("EXISTS") <= 10 * PAGES
        await assert_degraded(live)
        stub.heal()
        heal_ms = await live.heals(chains.spare)
        assert heal_ms < 1500
        await assert_up(live)
        fault_table.add("LOADING for 1 s", answers[0], live, heal_ms)


@pytest.mark.parametrize("word", ["NOAUTH", "READONLY", "CLUSTERDOWN", "ERR"])
async def test_error_words(tmp_path: Path, fault_table: FaultTable, word: str) -> None:
    """Whatever the server says instead of an answer, it is temporary; nothing is remembered when it stops saying so."""
    async with _over_a_stub(tmp_path) as (live, stub, chains):
        for command in ("EXISTS", "GET"):
            stub.on(command, error(f"{word} some words about it"))
        answer = await live.ask(chains())
        assert answer.shortfall == {"storage_unavailable": PAGES}
        assert answer.ms < SLACK_MS
        await assert_degraded(live)
        stub.heal()
        heal_ms = await live.heals(chains.spare)
        await assert_up(live)
        fault_table.add(f"{word} to every command", answer, live, heal_ms)


async def test_probes_answered_and_reads_refused(tmp_path: Path, fault_table: FaultTable) -> None:
    """`storage_up` follows reads: it stays 0 although probes go well, and reads are not repeated in a storm."""
    async with _over_a_stub(tmp_path, num_chains=33) as (live, stub, chains):
        stub.on("GET", error("ERR broken"))
        before = stub.count("GET")
        answers = [await live.ask(chains()) for _ in range(30)]
        assert answers[0].shortfall == {"storage_error": PAGES}
        reasons = {reason for one in answers for reason in one.shortfall}
        assert reasons <= {"storage_error", "storage_unavailable"}
        await assert_degraded(live)
        assert stub.count("GET") - before <= 10 * PAGES
        assert stub.count("PING") == 0
        stub.heal()
        heal_ms = await live.heals(chains.spare)
        await assert_up(live)
        fault_table.add("EXISTS fine, GET errors", answers[0], live, heal_ms)


async def test_probes_hang(tmp_path: Path, fault_table: FaultTable) -> None:
    async with _over_a_stub(tmp_path, probe_timeout_ms=PROBE_MS) as (live, stub, chains):
        stub.on("EXISTS", hold=True)
        answer = await live.ask(chains())
        assert answer.shortfall == {"storage_unavailable": PAGES}
        assert PROBE_MS - 50 < answer.ms < PROBE_MS + SLACK_MS
        assert await live.metric("storage_errors_total", 'kind="probe"') == 1
        first = await live.ask(chains(), deadline_ms=150)
        assert first.ms < 150 + SLACK_MS
        stub.heal()
        heal_ms = await live.heals(chains.spare)
        await assert_up(live)
        fault_table.add("EXISTS hangs", answer, live, heal_ms)


async def test_one_page_never_answers(tmp_path: Path, fault_table: FaultTable) -> None:
    async with _over_a_stub(tmp_path, stall_timeout_ms=5000) as (live, stub, chains):
        keys = chains()
        stub.on("GET", hold=True, key=name_of(live.model, keys[5]))
        answer = await live.ask(keys, deadline_ms=500)
        assert (answer.ready, answer.shortfall) == (5, {"deadline": 3})
        assert 400 < answer.ms < 600 + SLACK_MS
        stub.heal()
        heal_ms = await live.heals(lambda: keys)
        fault_table.add("page 5 never answers, deadline 500 ms", answer, live, heal_ms)


async def test_every_page_is_slow(tmp_path: Path, fault_table: FaultTable) -> None:
    async with _over_a_stub(tmp_path) as (live, stub, chains):
        stub.on("GET", delay_s=0.12)
        answer = await live.ask(chains(), deadline_ms=500)
        assert set(answer.shortfall) == {"deadline"}
        assert 2 <= answer.ready <= 4
        assert 400 < answer.ms < 600 + SLACK_MS
        slow = await live.ask(chains())
        assert slow.ready == PAGES
        await assert_up(live)
        fault_table.add("every page takes 120 ms, deadline 500 ms", answer, live)


async def test_no_free_connection(tmp_path: Path, fault_table: FaultTable) -> None:
    """One job hangs on the only connection; another one is answered by its own deadline."""
    async with _over_a_stub(tmp_path, stall_timeout_ms=5000, redis={"connections": 1}) as (live, stub, chains):
        hung = chains()
        stub.on("GET", hold=True, key=name_of(live.model, hung[0]))
        first = asyncio.create_task(live.ask(hung))
        await until(lambda: any(name_of(live.model, hung[0]) in command.words for command in stub.commands("GET")))
        answer = await live.ask(chains(), deadline_ms=300)
        assert answer.shortfall == {"deadline": PAGES}
        assert answer.ms < 400 + SLACK_MS
        stub.heal()
        assert (await first).ready == PAGES
        fault_table.add("no free connection, deadline 300 ms", answer, live)


async def test_pages_vanish_between_probe_and_read(tmp_path: Path, fault_table: FaultTable) -> None:
    async with _over_a_stub(tmp_path) as (live, stub, chains):
        keys = chains()
        stub.on("GET", bulk(None), key=name_of(live.model, keys[5]))
        answer = await live.ask(keys)
        assert (answer.ready, answer.shortfall) == (5, {"vanished": 3})
        await live.quiet()
        assert await live.metric("storage_errors_total", 'kind="missing"') == 1
        await assert_up(live)
        fault_table.add("page 5 evicted between probe and read", answer, live)


def _endless(head: bytes) -> Iterable[bytes]:
    return itertools.chain([head], itertools.repeat(b"x" * 65536))


# What comes instead of page 3, and the reason that the caller gets: it is the page's fault, or the server's.
HOSTILE: dict[str, tuple[Reply, str]] = {
    "value of length 0": (b"$0\r\n\r\n", "corrupt"),
    "length of 4 GiB": (lambda _: _endless(b"$4294967296\r\n"), "corrupt"),
    "length that is no number": (b"$12x\r\nabc\r\n", "storage_error"),
    "negative length": (b"$-2\r\n", "storage_error"),
    "line without end": (lambda _: _endless(b"$"), "storage_error"),
    "array": (array([bulk(b"a"), bulk(b"b")]), "storage_error"),
    "status": (b"+OK\r\n", "storage_error"),
    "shorter than its length": (b"$%d\r\nabc\r\n" % (PAGE_BYTES + 96), "storage_error"),
    "error without end": (lambda _: _endless(b"-ERR "), "storage_error"),
    "another protocol": (b"HTTP/1.1 400 Bad Request\r\n\r\n", "storage_error"),
}


@pytest.mark.parametrize(("reply", "reason"), HOSTILE.values(), ids=HOSTILE.keys())
async def test_replies_that_are_no_values(
    tmp_path: Path, fault_table: FaultTable, reply: Reply, reason: str, request: pytest.FixtureRequest
) -> None:
    async with _over_a_stub(tmp_path) as (live, stub, chains):
        keys = chains()
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        stub.on("GET", reply, key=name_of(live.model, keys[3]))
        answer = await live.ask(keys, deadline_ms=3000)
        assert (answer.ready, answer.shortfall) == (3, {reason: PAGES - 3})
        assert answer.ms < 1.25 * STALL_MS + SLACK_MS
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 32 << 10
        stub.heal()
        heal_ms = await live.heals(lambda: keys)
        await assert_up(live)
        fault_table.add(f"reply: {request.node.callspec.id}", answer, live, heal_ms)
