"""A cluster behind the storage: the distribution is learned, corrected and learned again; nodes fail by themselves."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from redis.crc import key_slot

from contract.polling import until
from contract.storage_contract import KV, LOADED, MISSING, Landing, ask, bits, hybrid, keys, payloads, store
from forestage.core.errors import StorageUnavailableError
from forestage.storage.base import ReadOutcome
from forestage.storage.redis import RedisStorage
from forestage.storage.redis.errors import DesyncError
from forestage.storage.redis.slot_map import SlotRange, parse_slots
from support.redis_stub import StubCluster
from support.resp import error

ERROR, UNREACHABLE = ReadOutcome.ERROR, ReadOutcome.UNREACHABLE
MODEL = hybrid(shards=1)
PAGES = keys(30)


@pytest.fixture
def nodes() -> Iterator[StubCluster]:
    with StubCluster() as nodes:
        yield nodes


@pytest_asyncio.fixture
async def storage(nodes: StubCluster) -> AsyncIterator[RedisStorage]:
    storage = RedisStorage(nodes.url, connections=2, probe_timeout_s=1.0, stall_timeout_s=0.5)
    await store(storage, MODEL, KV, *PAGES)
    assert {nodes.number_of(name(page)) for page in PAGES} == {0, 1, 2}
    yield storage
    storage.check_integrity()
    await storage.aclose()


def name(page: bytes) -> bytes:
    return f"forestage:{MODEL.fingerprint}:kv:0:".encode() + page


async def read(storage: RedisStorage) -> list[ReadOutcome]:
    return await Landing(MODEL, KV, PAGES).read(storage)


async def heals(storage: RedisStorage) -> None:
    """Return when everything is read again."""
    async with asyncio.timeout(5):
        while await read(storage) != [LOADED] * 30:
            pass


async def probe(storage: RedisStorage) -> str:
    return bits((await ask(storage, MODEL, PAGES)).masks[KV])


def everywhere_but(nodes: StubCluster, lost: int, failure: ReadOutcome) -> list[ReadOutcome]:
    return [failure if nodes.number_of(name(page)) == lost else LOADED for page in PAGES]


async def test_one_round_trip_a_node(nodes: StubCluster, storage: RedisStorage) -> None:
    before = [node.accepted for node in nodes.nodes]
    assert await probe(storage) == "1" * 30
    assert await read(storage) == [LOADED] * 30
    assert [node.accepted for node in nodes.nodes] == before
    assert sum(node.count("CLUSTER") for node in nodes.nodes) == 1


async def test_moved_slots_are_found_and_the_distribution_is_learned_again(
    nodes: StubCluster, storage: RedisStorage
) -> None:
    for page in PAGES:
        slot, source = key_slot(name(page)), nodes.number_of(name(page))
        nodes.nodes[(source + 1) % 3].values[name(page)] = nodes.nodes[source].values.pop(name(page))
        nodes.give(slot, (source + 1) % 3)
    assert await read(storage) == [LOADED] * 30
    await until(lambda: sum(node.count("CLUSTER") for node in nodes.nodes) == 2)
    await until(lambda: storage.num_links > 0)
    gets = sum(node.count("GET") for node in nodes.nodes)
    assert await read(storage) == [LOADED] * 30
    assert sum(node.count("GET") for node in nodes.nodes) == gets + 30  # nobody was asked in vain
    assert await probe(storage) == "1" * 30


async def test_asked_elsewhere_once(nodes: StubCluster, storage: RedisStorage) -> None:
    page = PAGES[7]
    slot, source = key_slot(name(page)), nodes.number_of(name(page))
    target = nodes.nodes[(source + 1) % 3]
    target.values[name(page)] = nodes.nodes[source].values.pop(name(page))
    for command in ("GET", "EXISTS", "SET", "UNLINK"):
        nodes.nodes[source].on(command, error(f"ASK {slot} 127.0.0.1:{target.port}"), key=name(page))
    assert await probe(storage) == "1" * 30
    assert await read(storage) == [LOADED] * 30
    await storage.write(MODEL, KV, page, payloads(MODEL, KV, page))
    assert await storage.delete(MODEL, KV, page)
    assert name(page) not in target.values
    assert target.count("ASKING") == 4
    assert sum(node.count("CLUSTER") for node in nodes.nodes) == 1  # the slot is still with its node


async def test_trying_again(nodes: StubCluster, storage: RedisStorage) -> None:
    owner = nodes.owner(name(PAGES[3]))
    for command in ("GET", "EXISTS", "SET"):
        owner.on(command, error("TRYAGAIN Multiple keys request during rehashing of slot"), key=name(PAGES[3]), times=2)
    assert await probe(storage) == "1" * 30
    assert await read(storage) == [LOADED] * 30
    await store(storage, MODEL, KV, PAGES[3])


async def test_going_in_circles_ends(nodes: StubCluster, storage: RedisStorage) -> None:
    page = PAGES[0]
    slot, owner = key_slot(name(page)), nodes.owner(name(page))
    owner.on("GET", error(f"MOVED {slot} 127.0.0.1:{owner.port}"), key=name(page))
    outcomes = await asyncio.wait_for(read(storage), 5.0)
    assert outcomes == [ERROR] + [LOADED] * 29
    assert sum(command.words[1] == name(page) for command in owner.commands("GET")) == 5


async def test_a_node_that_is_gone_is_a_matter_of_its_pages(nodes: StubCluster, storage: RedisStorage) -> None:
    lost = nodes.number_of(name(PAGES[4]))
    first = next(at for at, page in enumerate(PAGES) if nodes.number_of(name(page)) == lost)
    nodes.nodes[lost].refuse()
    assert await read(storage) == everywhere_but(nodes, lost, ERROR)
    answer = await ask(storage, MODEL, PAGES)
    assert (bits(answer.masks[KV]), answer.unasked_from) == ("1" * first + "0" * (30 - first), first)
    assert (await ask(storage, MODEL, PAGES[:first])).unasked_from is None
    # What one of the others says is missing is missing, whoever is silent behind it.
    absent = next(key for key in keys(99)[30:] if nodes.number_of(name(key)) != lost)
    answer = await ask(storage, MODEL, [*PAGES[:first], absent, *PAGES[first:]])
    assert (answer.unasked_from, bits(answer.masks[KV])) == (None, "1" * first + "0" * (31 - first))
    with pytest.raises(StorageUnavailableError):
        await store(storage, MODEL, KV, PAGES[first])
    await store(storage, MODEL, KV, PAGES[0 if first else 1])
    nodes.nodes[lost].heal()
    await heals(storage)
    assert await probe(storage) == "1" * 30


async def test_a_node_that_is_silent_is_left_alone_after_the_first_time(
    nodes: StubCluster, storage: RedisStorage
) -> None:
    lost = nodes.number_of(name(PAGES[4]))
    nodes.nodes[lost].on("*", hold=True)
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await read(storage) == everywhere_but(nodes, lost, ERROR)
    assert 0.4 < loop.time() - began < 1.5  # the stall timeout
    began, asked = loop.time(), len(nodes.nodes[lost].log)
    assert await read(storage) == everywhere_but(nodes, lost, ERROR)
    assert loop.time() - began < 0.2
    assert len(nodes.nodes[lost].log) == asked
    nodes.nodes[lost].heal()
    await heals(storage)


async def test_a_silent_node_does_not_keep_the_others_answers(nodes: StubCluster) -> None:
    storage = RedisStorage(nodes.url, probe_timeout_s=3.0)
    await store(storage, MODEL, KV, *PAGES)
    lost = nodes.number_of(name(PAGES[4]))
    first = next(at for at, page in enumerate(PAGES) if nodes.number_of(name(page)) == lost)
    nodes.nodes[lost].on("EXISTS", hold=True)
    async with asyncio.timeout(2.9):  # less than the probe timeout
        assert await probe(storage) == "1" * first + "0" * (30 - first)
    nodes.nodes[lost].release()
    await storage.aclose()


async def test_without_any_node_the_storage_is_unreachable(nodes: StubCluster, storage: RedisStorage) -> None:
    for node in nodes.nodes:
        node.refuse()
    assert await read(storage) == [UNREACHABLE] * 30
    with pytest.raises(StorageUnavailableError):
        await probe(storage)


async def test_it_may_be_started_before_the_cluster(nodes: StubCluster) -> None:
    for node in nodes.nodes:
        node.refuse()
    storage = RedisStorage(nodes.url)
    with pytest.raises(StorageUnavailableError, match="refused"):
        await storage.open()
    assert await read(storage) == [UNREACHABLE] * 30
    for node in nodes.nodes:
        node.heal()
    await storage.open()
    assert await read(storage) == [MISSING] * 30
    await storage.aclose()


async def test_an_address_that_nobody_reaches(nodes: StubCluster, storage: RedisStorage) -> None:
    nodes.announced[2] = ("127.0.0.1", 1)
    other = RedisStorage(nodes.url, probe_timeout_s=1.0, stall_timeout_s=0.5)
    assert await read(other) == everywhere_but(nodes, 2, ERROR)
    await other.aclose()


# ---- the reply


def test_slots_are_parsed() -> None:
    reply = [
        [0, 99, [b"10.0.0.1", 7000, b"id", []], [b"10.0.0.2", 7000, b"id", []]],
        [100, 16383, [None, 7001, b"id"]],
        [200, 200, [b"", 7002]],
    ]
    assert parse_slots(reply, ("asked", 7009)) == [
        SlotRange(0, 99, ("10.0.0.1", 7000)),
        SlotRange(100, 16383, ("asked", 7001)),
        SlotRange(200, 200, ("asked", 7002)),
    ]


@pytest.mark.parametrize(
    "reply", [None, b"OK", [1], [[0, 1]], [[0, 16384, [b"h", 1]]], [[5, 4, [b"h", 1]]], [[0, 1, [7, 1]]], [[0, 1, []]]]
)
def test_nonsense_is_refused(reply: object) -> None:
    with pytest.raises(DesyncError):
        parse_slots(reply, ("asked", 1))
