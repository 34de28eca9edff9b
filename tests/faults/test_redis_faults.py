"""One Redis that is ill-treated below a running service: every request gets an answer that is true, and soon.

Each test is a row of the table that `pytest tests/faults --fault-table` prints.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from faults.fault_table import FaultTable
from faults.redis_stock import PAGES, Stock, assert_degraded, assert_up
from forestage.core.errors import StorageUnavailableError
from support.fault_proxy import FaultProxy
from support.live import make_keys
from support.live_redis import PAGE_BYTES, Answer, live_redis, name_of, put, until
from support.redis_servers import RedisServer, redis_server

__all__ = ["redis_server"]

PROBE_MS, STALL_MS = 400, 600
BRIEF = {"probe_timeout_ms": PROBE_MS}
SLACK_MS = 800  # a busy machine's, on top of what was asked for
THREE_AND_A_HALF = int(3.5 * PAGE_BYTES)


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[FaultProxy]:
    with FaultProxy(redis_server.port) as proxy:
        yield proxy


@dataclass(frozen=True)
class Outage:
    """A way to take a whole server away and to give it back."""

    name: str
    begin: Callable[[RedisServer, FaultProxy], None]
    end: Callable[[RedisServer, FaultProxy], None]
    within_ms: float


OUTAGES = [
    Outage("connections refused", lambda _, proxy: proxy.refuse(), lambda _, proxy: proxy.heal(), 0),
    Outage("accepted, never answered", lambda _, proxy: proxy.black_hole(), lambda _, proxy: proxy.heal(), PROBE_MS),
    Outage("frozen (SIGSTOP)", lambda server, _: server.stop(), lambda server, _: server.cont(), PROBE_MS),
    Outage("killed (SIGKILL), empty afterwards", lambda server, _: server.kill(), lambda server, _: server.start(), 0),
]


@pytest.mark.parametrize("outage", OUTAGES, ids=lambda outage: outage.name)
async def test_a_server_that_is_away(
    tmp_path: Path, redis_server: RedisServer, proxy: FaultProxy, fault_table: FaultTable, outage: Outage
) -> None:
    async with live_redis(tmp_path, proxy.url, storage=BRIEF) as live:
        stock = Stock(redis_server, live.model)
        resident = stock()
        assert (await live.ask(resident)).ready == PAGES
        await assert_up(live)
        outage.begin(redis_server, proxy)
        answer = await live.ask(stock())
        assert answer.shortfall == {"storage_unavailable": PAGES}
        assert answer.job.outcome == "miss"
        assert answer.ms < outage.within_ms + SLACK_MS
        await assert_degraded(live)

        # The breaker opens after three failures; from then on nobody waits, and what is resident is served.
        for _ in range(2):
            assert (await live.ask(make_keys(PAGES, "elsewhere"))).shortfall == {"storage_unavailable": PAGES}
        accepted = proxy.accepted
        later = [await live.ask([*resident, *make_keys(4, f"more {n}")]) for n in range(20)]
        assert [one.ready for one in later] == [PAGES] * 20
        assert {one.shortfall["storage_unavailable"] for one in later} == {4}
        assert sorted(one.ms for one in later)[14] < SLACK_MS  # but for trials
        assert proxy.accepted - accepted <= 4

        outage.end(redis_server, proxy)
        stock.store()
        heal_ms = await live.heals(stock.spare)
        assert heal_ms < 2000  # the breaker's longest pause so far, and its trial
        await assert_up(live)
        await live.quiet()
        fault_table.add(outage.name, answer, live, heal_ms)


@pytest.mark.parametrize("way", ["refused", "accepted, never answered"])
async def test_a_service_started_before_its_redis(
    tmp_path: Path, redis_server: RedisServer, proxy: FaultProxy, fault_table: FaultTable, way: str
) -> None:
    if way == "refused":
        proxy.refuse()
    else:
        proxy.black_hole()
    began = asyncio.get_running_loop().time()
    async with live_redis(tmp_path, proxy.url, storage=BRIEF) as live:
        assert asyncio.get_running_loop().time() - began < 2
        await assert_degraded(live)
        stock = Stock(redis_server, live.model)
        answer = await live.ask(stock())
        assert answer.shortfall == {"storage_unavailable": PAGES}
        assert answer.ms < PROBE_MS + SLACK_MS
        proxy.heal()
        heal_ms = await live.heals(stock.spare)
        await assert_up(live)
        await live.quiet()
        fault_table.add(f"service started first ({way})", answer, live, heal_ms)


@dataclass(frozen=True)
class MidReply:
    """A way to break off a reply after three pages and a half."""

    name: str
    begin: Callable[[FaultProxy], None]
    within_ms: float


MID_REPLY = [
    MidReply("reset in mid-reply", lambda proxy: proxy.cut(after=THREE_AND_A_HALF, reset=True), 0),
    MidReply("closed in mid-reply", lambda proxy: proxy.cut(after=THREE_AND_A_HALF), 0),
    MidReply("silent in mid-reply", lambda proxy: proxy.hold(after=THREE_AND_A_HALF), 1.25 * STALL_MS),
]


@pytest.mark.parametrize("broken", MID_REPLY, ids=lambda broken: broken.name)
async def test_a_reply_that_is_broken_off(
    tmp_path: Path, redis_server: RedisServer, proxy: FaultProxy, fault_table: FaultTable, broken: MidReply
) -> None:
    """What came before is kept; the connection is not used again."""
    async with live_redis(tmp_path, proxy.url) as live:
        stock = Stock(redis_server, live.model)
        assert (await live.ask(stock())).ready == PAGES
        broken.begin(proxy)
        keys = stock()
        answer = await live.ask(keys)
        assert (answer.ready, answer.shortfall) == (3, {"storage_error": 5})
        assert answer.ms < broken.within_ms + SLACK_MS
        await assert_degraded(live)
        proxy.heal()
        heal_ms = await live.heals(lambda: keys)
        await assert_up(live)
        await live.quiet()
        fault_table.add(broken.name, answer, live, heal_ms)


async def test_a_deadline_comes_before_the_stall(
    tmp_path: Path, redis_server: RedisServer, proxy: FaultProxy, fault_table: FaultTable
) -> None:
    async with live_redis(tmp_path, proxy.url, storage={"stall_timeout_ms": 5000}) as live:
        stock = Stock(redis_server, live.model)
        assert (await live.ask(stock())).ready == PAGES
        proxy.hold(after=int(5.5 * PAGE_BYTES))
        answer = await live.ask(stock(), deadline_ms=500)
        assert (answer.ready, answer.shortfall) == (5, {"deadline": 3})
        assert 400 < answer.ms < 500 + 100 + SLACK_MS
        proxy.heal()
        heal_ms = await live.heals(stock.spare)
        await live.quiet()
        fault_table.add("silent in mid-reply, deadline 500 ms", answer, live, heal_ms)


async def test_killed_in_mid_read(
    tmp_path: Path, redis_server: RedisServer, proxy: FaultProxy, fault_table: FaultTable
) -> None:
    async with live_redis(tmp_path, proxy.url) as live:
        stock = Stock(redis_server, live.model)
        assert (await live.ask(stock())).ready == PAGES
        proxy.hold(after=THREE_AND_A_HALF)
        held = proxy.replies + THREE_AND_A_HALF
        asking = asyncio.create_task(live.ask(stock()))
        await until(lambda: proxy.replies >= held)
        redis_server.kill()
        proxy.drop(reset=True)
        answer = await asking
        assert (answer.ready, answer.shortfall) == (3, {"storage_error": 5})
        redis_server.start()
        proxy.heal()
        stock.store()
        heal_ms = await live.heals(stock.spare)
        await assert_up(live)
        await live.quiet()
        fault_table.add("killed in mid-reply", answer, live, heal_ms)


async def test_slow_but_flowing_is_no_error(
    tmp_path: Path, redis_server: RedisServer, proxy: FaultProxy, fault_table: FaultTable
) -> None:
    async with live_redis(tmp_path, proxy.url) as live:
        stock = Stock(redis_server, live.model)
        proxy.throttle(PAGES * PAGE_BYTES / 1.8)
        answer = await live.ask(stock())
        assert answer.ready == PAGES
        assert answer.ms > 2 * STALL_MS
        assert await live.metric("storage_errors_total") == 0
        await assert_up(live)
        fault_table.add("slow: whole reply takes three stall timeouts", answer, live)


async def test_restarted_while_idle(
    tmp_path: Path, redis_server: RedisServer, proxy: FaultProxy, fault_table: FaultTable
) -> None:
    """Nobody notices but by the pages that are gone: they are not stored, and no error."""
    async with live_redis(tmp_path, proxy.url) as live:
        stock = Stock(redis_server, live.model)
        resident = stock()
        assert (await live.ask(resident)).ready == PAGES
        redis_server.restart()
        answer = await live.ask([*resident, *stock()])
        assert (answer.ready, answer.shortfall) == (PAGES, {"not_stored": PAGES})
        assert await live.metric("storage_errors_total") == 0
        await assert_up(live)
        stock.store()
        heal_ms = await live.heals(stock.spare)
        fault_table.add("restarted while idle, memory empty", answer, live, heal_ms)


async def test_idle_connections_closed_by_the_server(
    tmp_path: Path, redis_server: RedisServer, fault_table: FaultTable
) -> None:
    async with live_redis(tmp_path, redis_server.url) as live:
        stock = Stock(redis_server, live.model)
        assert (await live.ask(stock())).ready == PAGES
        assert redis_server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes") >= 1
        answer = await live.ask(stock())
        assert answer.ready == PAGES
        assert await live.metric("storage_errors_total") == 0
        await assert_up(live)
        fault_table.add("idle connections closed by the server", answer, live)


async def test_down_for_a_while_under_traffic(
    tmp_path: Path, redis_server: RedisServer, proxy: FaultProxy, fault_table: FaultTable
) -> None:
    """The breaker lets a trial through by itself, ever less often, and everything once one succeeds."""
    async with live_redis(tmp_path, proxy.url, storage=BRIEF) as live:
        stock = Stock(redis_server, live.model)
        assert (await live.ask(stock())).ready == PAGES
        proxy.black_hole()
        loop = asyncio.get_running_loop()
        accepted, until_s = proxy.accepted, loop.time() + 2.0
        answers: list[Answer] = []
        while loop.time() < until_s:
            answers.append(await live.ask(make_keys(PAGES, f"absent {len(answers)}")))
        assert {tuple(one.shortfall.items()) for one in answers} == {(("storage_unavailable", PAGES),)}
        times = sorted(one.ms for one in answers)
        assert times[-1] < PROBE_MS + SLACK_MS
        slow = sum(ms > 100 for ms in times)
        assert slow <= 3 + 3  # three that open it, then trials after 0.25, 0.5 and 1 s
        assert proxy.accepted - accepted <= 8
        assert await live.metric("storage_errors_total", 'kind="probe"') <= slow
        proxy.heal()
        heal_ms = await live.heals(stock.spare)
        assert heal_ms < 2500
        await assert_up(live)
        await live.quiet()
        slowest = max(answers, key=lambda answer: answer.ms)
        fault_table.add(f"away for 2 s, {len(answers)} jobs meanwhile (slowest)", slowest, live, heal_ms)


async def test_fifty_jobs_over_two_connections(
    tmp_path: Path, redis_server: RedisServer, proxy: FaultProxy, fault_table: FaultTable
) -> None:
    async with live_redis(tmp_path, proxy.url, slots=512, storage={"redis": {"connections": 2}}) as live:
        chains = [make_keys(PAGES, f"one of fifty {number}") for number in range(50)]
        put(redis_server, live.model, [key for chain in chains for key in chain])
        answers = await asyncio.gather(*(live.ask(chain) for chain in chains))
        assert [answer.ready for answer in answers] == [PAGES] * 50
        assert proxy.accepted <= 2 + 2 + 2  # readers, probes, writes
        await live.quiet()
        fault_table.add("50 jobs over 2 connections (slowest)", max(answers, key=lambda a: a.ms), live)


async def test_no_password(tmp_path: Path, fault_table: FaultTable) -> None:
    with RedisServer(tmp_path / "redis", "--requirepass", "secret", admin="default:secret") as server:
        async with live_redis(tmp_path, server.url) as live:
            stock = Stock(server, live.model)
            answer = await live.ask(stock())
            assert answer.shortfall == {"storage_unavailable": PAGES}
            await assert_degraded(live)
            server.command("CONFIG", "SET", "requirepass", "")
            heal_ms = await live.heals(stock.spare)
            await assert_up(live)
            fault_table.add("NOAUTH", answer, live, heal_ms)


async def test_no_permission_to_read(tmp_path: Path, redis_server: RedisServer, fault_table: FaultTable) -> None:
    """Probes go through, reads do not: the storage is not well, whatever the probes say."""
    async with live_redis(tmp_path, redis_server.url) as live:
        stock = Stock(redis_server, live.model)
        redis_server.command("ACL", "SETUSER", "default", "-get")
        answer = await live.ask(stock())
        assert (answer.ready, answer.shortfall) == (0, {"storage_error": PAGES})
        await assert_degraded(live)
        redis_server.command("ACL", "SETUSER", "default", "+get")
        heal_ms = await live.heals(stock.spare)
        await assert_up(live)
        await live.quiet()
        fault_table.add("NOPERM on GET", answer, live, heal_ms)


def _wrong_type(server: RedisServer, name: bytes) -> None:
    server.command("DEL", name)
    server.command("RPUSH", name, "a", "list")


def _one_byte_short(server: RedisServer, name: bytes) -> None:
    server.command("SET", name, server.command("GET", name)[:-1])


def _one_byte_long(server: RedisServer, name: bytes) -> None:
    server.command("APPEND", name, "x")


def _flipped_bit(server: RedisServer, name: bytes) -> None:
    server.command("SETBIT", name, 8 * 1000, 1 - server.command("GETBIT", name, 8 * 1000))


def _foreign(server: RedisServer, name: bytes) -> None:
    other = next(key for key in server.command("KEYS", "*") if key != name)
    server.command("COPY", other, name, "REPLACE")


def _huge(server: RedisServer, name: bytes) -> None:
    server.command("SETRANGE", name, 64 << 20, "x")


BAD_VALUES = {
    "WRONGTYPE (a list)": _wrong_type,
    "value one byte short": _one_byte_short,
    "value one byte long": _one_byte_long,
    "value of 64 MiB": _huge,
    "value with a flipped bit": _flipped_bit,
    "value of another page": _foreign,
}


@pytest.mark.parametrize("spoil", BAD_VALUES.values(), ids=BAD_VALUES.keys())
async def test_a_bad_value_is_a_matter_of_its_page(
    tmp_path: Path,
    redis_server: RedisServer,
    fault_table: FaultTable,
    spoil: Callable[[RedisServer, bytes], None],
    request: pytest.FixtureRequest,
) -> None:
    async with live_redis(tmp_path, redis_server.url) as live:
        stock = Stock(redis_server, live.model)
        keys = stock()
        spoil(redis_server, name_of(live.model, keys[3]))
        answer = await live.ask(keys)
        assert (answer.ready, answer.shortfall) == (3, {"corrupt": PAGES - 3})
        await live.quiet()
        assert await live.metric("storage_errors_total", 'kind="corrupt"') == 1
        await assert_up(live)
        assert (await live.ask(stock())).ready == PAGES
        redis_server.command("DEL", name_of(live.model, keys[3]))
        put(redis_server, live.model, [keys[3]])
        heal_ms = await live.heals(lambda: keys)
        await live.quiet()
        fault_table.add(request.node.callspec.id, answer, live, heal_ms)


async def _fill_up(server: RedisServer) -> None:
    server.command("CONFIG", "SET", "maxmemory", "1")


async def _make_replica(server: RedisServer) -> None:
    server.command("REPLICAOF", "127.0.0.1", "1")


async def _fail_to_save(server: RedisServer) -> None:
    shutil.rmtree(server.folder)
    server.command("CONFIG", "SET", "save", "3600 1")
    server.command("BGSAVE")
    with server.admin() as client:
        await until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")


@pytest.mark.parametrize(
    ("word", "spoil"), [("OOM", _fill_up), ("READONLY", _make_replica), ("MISCONF", _fail_to_save)]
)
async def test_refused_writes_never_touch_reads(
    tmp_path: Path,
    redis_server: RedisServer,
    fault_table: FaultTable,
    word: str,
    spoil: Callable[[RedisServer], Awaitable[None]],
) -> None:
    async with live_redis(tmp_path, redis_server.url) as live:
        stock = Stock(redis_server, live.model)
        await spoil(redis_server)
        for _ in range(4):
            with pytest.raises((OSError, StorageUnavailableError), match=word):
                await live.parts.storage.write(live.model, 0, make_keys(1, "new")[0], [bytes(PAGE_BYTES)])
        assert await live.metric("storage_errors_total", 'kind="write"') == 4
        answer = await live.ask(stock())
        assert answer.ready == PAGES
        await assert_up(live)
        fault_table.add(f"{word} on writes", answer, live)
