"""How the Redis storage treats its connections: kept, replaced, dropped, bounded, and never one reply behind."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from contract.polling import until
from contract.storage_contract import KV, LOADED, MISSING, STOPPED, Landing, ask, bits, hybrid, keys, payloads, store
from forestage.core.errors import StorageUnavailableError
from forestage.core.layout import ModelLayout
from forestage.storage.base import ReadOutcome
from forestage.storage.redis import RedisStorage
from forestage.storage.redis.reply_stream import ReplyStream
from support.redis_stub import RedisStub
from support.resp import error

UNREACHABLE = ReadOutcome.UNREACHABLE
MODEL = hybrid(shards=1, kv_bytes=65536)


@pytest.fixture
def stub() -> Iterator[RedisStub]:
    with RedisStub() as stub:
        yield stub


@pytest_asyncio.fixture
async def storage(stub: RedisStub) -> AsyncIterator[RedisStorage]:
    storage = RedisStorage(stub.url, connections=1, probe_timeout_s=5, stall_timeout_s=5)
    yield storage
    storage.check_integrity()
    await storage.aclose()


def name(key: bytes, model: ModelLayout = MODEL) -> bytes:
    return f"forestage:{model.fingerprint}:kv:0:".encode() + key


async def read(storage: RedisStorage, *pages: bytes) -> list[ReadOutcome]:
    return await Landing(MODEL, KV, pages).read(storage)


# ---- kept and replaced


async def test_a_connection_is_kept(stub: RedisStub, storage: RedisStorage) -> None:
    pages = keys(4)
    await store(storage, MODEL, KV, *pages)
    for _ in range(5):
        assert await read(storage, *pages) == [LOADED] * 4
        assert bits((await ask(storage, MODEL, pages)).masks[KV]) == "1111"
    assert stub.accepted == 1


async def test_connections_closed_while_idle_are_not_noticed(stub: RedisStub, storage: RedisStorage) -> None:
    pages = keys(4)
    await store(storage, MODEL, KV, *pages)
    for action in ("read", "probe", "write", "delete"):
        accepted = stub.accepted
        stub.drop()
        await until(lambda: stub.open == 0)
        match action:
            case "read":
                assert await read(storage, *pages) == [LOADED] * 4
            case "probe":
                assert bits((await ask(storage, MODEL, pages)).masks[KV]) == "1111"
            case "write":
                await store(storage, MODEL, KV, pages[0])
            case "delete":
                assert await storage.delete(MODEL, KV, pages[3])
        assert stub.accepted == accepted + 1


async def test_a_connection_that_ends_instead_of_answering_is_replaced_once(
    stub: RedisStub, storage: RedisStorage
) -> None:
    """It looked alive until it was used; whoever asks does not notice. A fresh one that ends so is a failure."""
    pages = keys(4)
    await store(storage, MODEL, KV, *pages)
    for command, times in (("GET", 1), ("EXISTS", 1)):
        stub.on(command, cut_after=0, times=times)
        accepted = stub.accepted
        if command == "GET":
            assert await read(storage, *pages) == [LOADED] * 4
        else:
            assert bits((await ask(storage, MODEL, pages)).masks[KV]) == "1111"
        assert stub.accepted == accepted + 1
    stub.on("*", cut_after=0)
    accepted = stub.accepted
    assert await read(storage, *pages) == [UNREACHABLE] * 4
    assert stub.accepted == accepted + 1
    with pytest.raises(StorageUnavailableError):
        await ask(storage, MODEL, pages)
    stub.heal()
    assert await read(storage, *pages) == [LOADED] * 4


async def test_a_reset_in_mid_reply_spoils_the_rest(stub: RedisStub, storage: RedisStorage) -> None:
    pages = keys(4)
    await store(storage, MODEL, KV, *pages)
    stub.on("GET", key=name(pages[2]), cut_after=30_000)
    assert await read(storage, *pages) == [LOADED, LOADED, UNREACHABLE, UNREACHABLE]
    stub.heal()
    assert await read(storage, *pages) == [LOADED] * 4


@pytest.mark.parametrize(
    "refusal",
    [
        "LOADING Redis is loading the dataset in memory",
        "NOAUTH Authentication required.",
        "NOPERM this user has no permissions to run the 'get' command",
        "MASTERDOWN Link with MASTER is down",
        "CLUSTERDOWN The cluster is down",
        "ERR max number of clients reached",
        "MOVED 1 127.0.0.1:1",
    ],
)
async def test_a_server_that_refuses_is_unreachable(stub: RedisStub, storage: RedisStorage, refusal: str) -> None:
    pages = keys(4)
    await store(storage, MODEL, KV, *pages)
    stub.on("GET", error(refusal))
    stub.on("EXISTS", error(refusal))
    assert set(await read(storage, *pages)) == {UNREACHABLE}
    with pytest.raises(StorageUnavailableError, match=refusal.split()[0]):
        await ask(storage, MODEL, pages)
    stub.heal()
    assert await read(storage, *pages) == [LOADED] * 4
    assert bits((await ask(storage, MODEL, pages)).masks[KV]) == "1111"


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", OSError),
        ("MISCONF Redis is configured to save RDB snapshots", OSError),
        ("NOPERM this user has no permissions to run the 'set' command", OSError),
        ("READONLY You can't write against a read only replica.", StorageUnavailableError),
        ("LOADING Redis is loading the dataset in memory", StorageUnavailableError),
    ],
)
async def test_a_refused_write_raises_and_spoils_no_read(
    stub: RedisStub, storage: RedisStorage, refusal: str, expected: type[Exception]
) -> None:
    pages = keys(3)
    await store(storage, MODEL, KV, *pages)
    stub.on("SET", error(refusal))
    with pytest.raises(expected, match=refusal.split()[0]):
        await store(storage, MODEL, KV, keys(1, "new")[0])
    assert await read(storage, *pages) == [LOADED] * 3
    assert stub.count("SET") == 4


async def test_open_says_that_nobody_is_there(stub: RedisStub, storage: RedisStorage) -> None:
    stub.refuse()
    with pytest.raises(StorageUnavailableError, match="refused"):
        await storage.open()
    assert await read(storage, *keys(2)) == [UNREACHABLE] * 2
    stub.heal()
    await storage.open()
    assert await read(storage, *keys(2)) == [MISSING] * 2


async def test_a_mistake_of_ours_costs_the_connection_and_is_logged(
    storage: RedisStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pages = keys(3)
    await store(storage, MODEL, KV, *pages)
    with monkeypatch.context() as patch:
        patch.setattr(ReplyStream, "read_run", lambda stream, values, due: 1 // 0)
        assert await read(storage, *pages) == [UNREACHABLE] * 3
    assert "ZeroDivisionError" in caplog.text
    assert storage.num_links == 0
    assert await read(storage, *pages) == [LOADED] * 3


# ---- silent servers


async def test_a_page_is_whole_although_the_next_reply_does_not_come(stub: RedisStub, storage: RedisStorage) -> None:
    pages = keys(6)
    await store(storage, MODEL, KV, *pages)
    stub.on("GET", key=name(pages[4]), hold=True)
    landing = Landing(MODEL, KV, pages)
    reading = asyncio.create_task(storage.read_into(MODEL, landing.reads, landing.report))
    await until(lambda: len(landing.reports) == 4, deadline_s=1.0)
    storage.stalled(landing.reads)
    await asyncio.wait_for(reading, 1.0)
    assert landing.outcomes() == [LOADED] * 4 + [STOPPED] * 2
    stub.release()
    assert await read(storage, *pages) == [LOADED] * 6


async def test_nobody_waits_for_bytes_that_do_not_come(storage: RedisStorage) -> None:
    pages = keys(80)
    await store(storage, MODEL, KV, *pages)
    began = time.monotonic()
    for page in pages:
        assert await read(storage, page) == [LOADED]
    assert time.monotonic() - began < 3.0  # such a wait lasts 50 ms, 4 s in all


async def test_a_silent_server_is_given_up(stub: RedisStub) -> None:
    storage = RedisStorage(stub.url, connections=1, probe_timeout_s=5, stall_timeout_s=0.1)
    pages = keys(3)
    await store(storage, MODEL, KV, *pages)
    stub.on("GET", key=name(pages[1]), hold=True)
    assert await asyncio.wait_for(read(storage, *pages), 3.0) == [LOADED, UNREACHABLE, UNREACHABLE]
    stub.on("SET", hold=True)
    with pytest.raises(StorageUnavailableError):
        await asyncio.wait_for(store(storage, MODEL, KV, pages[0]), 3.0)
    stub.heal()
    assert await read(storage, *pages) == [LOADED] * 3
    await storage.aclose()


async def test_a_slow_reply_that_flows_is_no_silence(stub: RedisStub) -> None:
    storage = RedisStorage(stub.url, connections=1, stall_timeout_s=0.15)
    model, key = hybrid(shards=1, kv_bytes=512 << 10), keys(1)[0]
    await store(storage, model, KV, key)
    stub.on("GET", pace_s=0.1)
    landing = Landing(model, KV, [key])
    seen: set[int] = set()
    reading = asyncio.create_task(storage.read_into(model, landing.reads, landing.report))
    while not reading.done():
        seen.add(landing.reads[0].progress)
        await asyncio.sleep(0.02)
    assert landing.outcomes() == [LOADED]
    assert len(seen) >= 6  # for 8 pieces, 0.8 s in all
    landing.check()
    await storage.aclose()


async def test_what_nobody_wants_is_left_when_it_does_not_come(stub: RedisStub, storage: RedisStorage) -> None:
    pages = keys(4)
    await store(storage, MODEL, KV, *pages)
    stub.on("GET", key=name(pages[1]), hold=True)
    landing = Landing(MODEL, KV, pages)
    reading = asyncio.create_task(storage.read_into(MODEL, landing.reads, landing.report))
    await until(lambda: len(landing.reports) == 1)
    for page in landing.reads:
        page.stopped = True
    await asyncio.wait_for(reading, 1.0)
    assert landing.outcomes() == [LOADED, STOPPED, STOPPED, STOPPED]
    stub.release()
    assert await read(storage, *pages) == [LOADED] * 4


@pytest.mark.parametrize("how", ["cancelled", "stalled"])
async def test_who_still_connects_is_not_waited_for(stub: RedisStub, how: str) -> None:
    """Nothing of it touches a slot later."""
    storage = RedisStorage(stub.url.replace("//", "//me:pw@"), connections=1, probe_timeout_s=10, stall_timeout_s=10)
    stub.on("AUTH", hold=True)
    pages = keys(4)
    for page in pages:
        stub.values[name(page)] = bytes(65536 + 96)
    landing = Landing(MODEL, KV, pages)
    reading = asyncio.create_task(storage.read_into(MODEL, landing.reads, landing.report))
    await until(lambda: stub.count("AUTH") == 1)
    if how == "cancelled":
        reading.cancel()
    else:
        storage.stalled(landing.reads)
    await asyncio.wait_for(asyncio.wait([reading]), 1.0)
    assert landing.outcomes() == [STOPPED] * 4
    node = storage._directory.only_node
    assert node is not None
    assert node.readers.stalled == 1
    stub.heal()
    await until(lambda: node.readers.stalled == 0)  # it has connected now
    assert await read(storage, keys(1, "other")[0]) == [MISSING]
    assert [command.words[1] for command in stub.commands("GET")] == [name(keys(1, "other")[0])]
    assert landing.memory == b"\xa5" * len(landing.memory)
    storage.check_integrity()
    await storage.aclose()


async def test_closing_ends_what_runs(stub: RedisStub, storage: RedisStorage) -> None:
    pages = keys(4)
    await store(storage, MODEL, KV, *pages)
    stub.on("*", hold=True)
    landing = Landing(MODEL, KV, pages)
    running = [
        asyncio.create_task(storage.read_into(MODEL, landing.reads, landing.report)),
        asyncio.create_task(ask(storage, MODEL, pages)),
        asyncio.create_task(store(storage, MODEL, KV, pages[0])),
    ]
    await until(lambda: {"GET", "EXISTS", "SET"} <= {command.name for command in stub.log[-6:]})
    await storage.aclose()
    done = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 1.0)
    assert done[0] is None
    assert landing.outcomes() == [STOPPED] * 4
    assert [type(failure) for failure in done[1:]] == [StorageUnavailableError] * 2
    await until(lambda: storage.num_links == 0)
    stub.release()


# ---- bounds


async def test_replies_due_are_bounded(stub: RedisStub, storage: RedisStorage) -> None:
    """With one connection 4 MiB: the first GET is held, and the stub counts how many wait behind it."""
    pages = keys(256)
    stub.on("GET", hold=True, times=1)
    landing = Landing(MODEL, KV, pages)
    reading = asyncio.create_task(storage.read_into(MODEL, landing.reads, landing.report))
    await until(lambda: stub.count("GET") == 1)
    for page in landing.reads:
        page.stopped = True
    stub.release()
    await asyncio.wait_for(reading, 5.0)
    assert stub.count("GET") == (4 << 20) // 65536
    assert landing.outcomes() == [MISSING] * 64 + [STOPPED] * 192
    assert stub.accepted == 1  # a window was read to its end, so the connection is good for more
    assert await read(storage, pages[0]) == [MISSING]
    assert stub.accepted == 1


async def test_large_replies_due_are_bounded_over_all_connections(stub: RedisStub) -> None:
    """Two at a time of more than 8 MiB; who waits for them can be stopped, cancelled, and gets its turn."""
    storage = RedisStorage(stub.url, connections=4, probe_timeout_s=10, stall_timeout_s=10)
    model, pages = hybrid(shards=1, kv_bytes=9 << 20), keys(6)
    await store(storage, model, KV, *pages)
    stub.on("GET", hold=True)
    landings = [Landing(model, KV, [page]) for page in pages]
    running = [asyncio.create_task(storage.read_into(model, one.reads, one.report)) for one in landings]
    await until(lambda: stub.count("GET") == 2 and storage.num_links == 4)
    asked = [words[1] for words in (command.words for command in stub.commands("GET"))]
    waiting = [number for number in range(4) if name(pages[number], model) not in asked]
    landings[waiting[0]].reads[0].stopped = True
    await asyncio.wait_for(running[waiting[0]], 1.0)
    assert landings[waiting[0]].outcomes() == [STOPPED]
    running[waiting[1]].cancel()
    await asyncio.wait_for(asyncio.wait([running[waiting[1]]]), 1.0)
    assert landings[waiting[1]].outcomes() == [STOPPED]
    storage.check_integrity()
    assert stub.count("GET") == 2
    stub.release()
    await asyncio.wait_for(asyncio.wait(running), 10.0)
    for number, landing in enumerate(landings):
        landing.check()
        assert landing.outcomes() == [STOPPED if number in waiting else LOADED]
    storage.check_integrity()
    await storage.aclose()


async def test_connections_are_bounded(stub: RedisStub) -> None:
    storage = RedisStorage(stub.url, connections=2, probe_timeout_s=10, stall_timeout_s=10)
    chains = [keys(4, f"chain {n}") for n in range(25)]
    for chain in chains:
        await store(storage, MODEL, KV, *chain)
    stub.on("GET", delay_s=0.002)
    most = 0

    async def one(chain: list[bytes]) -> list[ReadOutcome]:
        nonlocal most
        presence = await ask(storage, MODEL, chain)
        assert bits(presence.masks[KV]) == "1111"
        outcomes = await read(storage, *chain)
        most = max(most, stub.open)
        await storage.write(MODEL, KV, chain[0], payloads(MODEL, KV, chain[0]))
        return outcomes

    assert await asyncio.gather(*(one(chain) for chain in chains * 2)) == [[LOADED] * 4] * 50
    assert 2 <= most <= 2 + 2 + 2
    await storage.aclose()


# ---- cancelled, then another key (S17)


@pytest.mark.parametrize("when", ["before the reply", "in mid body", "between replies"])
async def test_after_a_cancelled_read_the_next_key_gets_its_own_bytes(stub: RedisStub, when: str) -> None:
    storage = RedisStorage(stub.url, connections=1, probe_timeout_s=5, stall_timeout_s=5)
    a, b = keys(8, "a"), keys(8, "b")
    await store(storage, MODEL, KV, *a, *b)
    chance = random.Random(when)
    match when:
        case "before the reply":
            stub.on("GET", key=name(a[0]), delay_s=0.001)
        case "in mid body":
            stub.on("GET", key=name(a[2]), pace_s=0.001)
        case _:
            stub.on("GET", key=name(a[3]), delay_s=0.001)
    for _ in range(120):
        landing = Landing(MODEL, KV, a)
        reading = asyncio.create_task(storage.read_into(MODEL, landing.reads, landing.report))
        await asyncio.sleep(chance.choice((0, 0, 0.0005, 0.001, 0.002)))
        came_too_late = not reading.cancel()
        outcomes = read(storage, *b)
        if not came_too_late:
            with pytest.raises(asyncio.CancelledError):
                await reading
        landing.memory[:] = b"\xee" * len(landing.memory)
        assert await outcomes == [LOADED] * 8
        assert landing.memory == b"\xee" * len(landing.memory)
        assert storage.num_links <= 2
    storage.check_integrity()
    await storage.aclose()


async def test_after_a_cancelled_probe_the_next_one_gets_its_own_answer(stub: RedisStub, storage: RedisStorage) -> None:
    there, absent = keys(8, "there"), keys(8, "absent")
    await store(storage, MODEL, KV, *there)
    stub.on("EXISTS", key=name(there[3]), delay_s=0.001)
    for number in range(120):
        probing = asyncio.create_task(ask(storage, MODEL, there))
        await asyncio.sleep((number % 3) * 0.0005)
        probing.cancel()
        assert bits((await ask(storage, MODEL, absent)).masks[KV])[0] == "0"
        await asyncio.wait([probing])
    storage.check_integrity()
    assert storage.num_links <= 2
