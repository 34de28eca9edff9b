"""The Redis storage keeps the contract on every kind of server."""

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

import pytest
import pytest_asyncio

from contract.storage_contract import KV, STATE, Back, Landing, StorageContract, hybrid, keys, payload, store
from forestage.core.layout import LmcacheNaming, ModelLayout
from forestage.storage.redis import LmcacheRedisStorage, RedisStorage
from support.redis_servers import (
    ClusterGroup,
    RedisServer,
    SecuredServer,
    SentinelGroup,
    cluster,
    secured,
    sentinel,
    standalone,
)

SILENT_S = 10.0  # nothing here is silent on purpose; what is, waits this long on a busy machine


class RedisBack(Back):
    storage: RedisStorage

    def __init__(self, url: str) -> None:
        self.storage = RedisStorage(url, probe_timeout_s=SILENT_S, stall_timeout_s=SILENT_S)

    @abstractmethod
    def server_of(self, name: bytes) -> RedisServer:
        """Return the server that has a Redis key."""

    def name(self, model: ModelLayout, component_index: int, key: bytes, shard: int) -> bytes:
        return f"forestage:{model.fingerprint}:{model.components[component_index].name}:{shard}:".encode() + key

    async def get(self, model: ModelLayout, component_index: int, key: bytes, shard: int) -> bytes | None:
        name = self.name(model, component_index, key, shard)
        value = self.server_of(name).command("GET", name)
        assert value is None or isinstance(value, bytes)
        return value

    async def put(self, model: ModelLayout, component_index: int, key: bytes, shard: int, value: bytes) -> None:
        name = self.name(model, component_index, key, shard)
        self.server_of(name).command("SET", name, value)

    async def remove(self, model: ModelLayout, component_index: int, key: bytes, shard: int) -> None:
        name = self.name(model, component_index, key, shard)
        assert self.server_of(name).command("DEL", name) == 1


class OneBack(RedisBack):
    def __init__(self, url: str, server: RedisServer) -> None:
        super().__init__(url)
        self.server = server

    def server_of(self, name: bytes) -> RedisServer:
        return self.server


class ClusterBack(RedisBack):
    def __init__(self, group: ClusterGroup) -> None:
        super().__init__(group.url_of([0]))
        self.group = group

    def server_of(self, name: bytes) -> RedisServer:
        return self.group.nodes[self.group.owner(name)]


async def _lent(back: RedisBack, *servers: RedisServer) -> AsyncIterator[RedisBack]:
    """Empty the servers, lend the storage, and look afterwards whether it is whole."""
    for server in servers:
        server.command("FLUSHALL")
    await back.storage.open()
    yield back
    back.storage.check_integrity()
    await back.storage.aclose()
    assert back.storage.num_links == 0


class LmcacheBack(RedisBack):
    """LMCache's names, as it makes them for a world of as many ranks as there are shards; values are payloads."""

    verifies_content = False

    def __init__(self, url: str, server_of: Callable[[bytes], RedisServer]) -> None:
        self.storage = LmcacheRedisStorage(url, probe_timeout_s=SILENT_S, stall_timeout_s=SILENT_S)
        self._server_of = server_of

    def server_of(self, name: bytes) -> RedisServer:
        return self._server_of(name)

    def name(self, model: ModelLayout, component_index: int, key: bytes, shard: int) -> bytes:
        world = model.components[component_index].shards
        rank = world << 24 | shard << 16 | world << 8 | shard
        return f"{model.name}@{rank:08x}@{component_index:x}@{key.hex()}".encode()


class RedisContract(StorageContract):
    async def test_iterates_over_whole_pages(self, back: RedisBack) -> None:
        model, pages = hybrid(), keys(50)
        await store(back.storage, model, KV, *pages)
        await store(back.storage, model, STATE, pages[2])
        await store(back.storage, hybrid("other"), KV, *pages)
        await back.remove(model, KV, pages[1], 0)
        whole = [(KV, page) for page in pages if page != pages[1]]
        assert sorted(back.storage.iter_pages(model)) == sorted([*whole, (STATE, pages[2])])

    async def test_a_foreign_kind_of_value_is_corrupt(self, back: RedisBack) -> None:
        model, pages = hybrid(), keys(3)
        await store(back.storage, model, KV, *pages)
        name = back.name(model, KV, pages[1], 1)
        back.server_of(name).command("DEL", name)
        back.server_of(name).command("RPUSH", name, "a", "list")
        outcomes = await Landing(model, KV, pages).read(back.storage)
        assert [str(outcome) for outcome in outcomes] == ["loaded", "corrupt", "loaded"]


@pytest.fixture(scope="module")
def tcp_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with standalone(tmp_path_factory.mktemp("tcp")) as server:
        yield server


class TestLmcache(RedisContract):
    @pytest_asyncio.fixture
    async def back(self, tcp_server: RedisServer) -> AsyncIterator[RedisBack]:
        async for back in _lent(LmcacheBack(tcp_server.url, lambda _: tcp_server), tcp_server):
            yield back

    async def test_names_and_values_are_those_of_lmcache(self, back: RedisBack) -> None:
        """As listed for version 0.5.6: model, rank word, group and hash, then the salt, and nothing but the payload."""
        model = replace(hybrid("bench/model", shards=1), lmcache=LmcacheNaming("bench/model"))
        salted = replace(model, lmcache=LmcacheNaming("org/served", "tenant-a"))
        key = bytes.fromhex("61b9" * 16)
        for layout in (model, salted):
            await store(back.storage, layout, KV, key)
            await store(back.storage, layout, STATE, key)
        names = {
            f"bench/model@01000100@0@{key.hex()}": (model, KV),
            f"bench/model@01000100@1@{key.hex()}": (model, STATE),
            f"org/served@01000100@0@{key.hex()}@tenant-a": (salted, KV),
            f"org/served@01000100@1@{key.hex()}@tenant-a": (salted, STATE),
        }
        server = back.server_of(b"")
        there = server.command("KEYS", "*")
        assert isinstance(there, list)
        assert {name.decode() for name in there} == set(names)
        for name, (layout, component) in names.items():
            assert server.command("GET", name) == payload(layout, component, key, 0)
        assert sorted(back.storage.iter_pages(model)) == [(KV, key), (STATE, key)]
        assert sorted(back.storage.iter_pages(salted)) == [(KV, key), (STATE, key)]

    async def test_what_a_size_cannot_tell(self, back: RedisBack) -> None:
        """Another page's bytes, and flipped ones, are taken as they are; every other size is not."""
        model, pages = hybrid(shards=1), keys(4)
        await store(back.storage, model, KV, *pages)
        size = model.components[KV].bytes
        await back.put(model, KV, pages[0], 0, bytes(size))
        await back.put(model, KV, pages[1], 0, bytes(size - 1))
        await back.put(model, KV, pages[2], 0, bytes(size + 1))
        landing = Landing(model, KV, pages)
        await back.storage.read_into(model, landing.reads, landing.report)
        assert [str(outcome) for outcome in landing.outcomes()] == ["loaded", "corrupt", "corrupt", "loaded"]
        assert bytes(landing.reads[0].views[0]) == bytes(size)
        assert bytes(landing.reads[3].views[0]) == payload(model, KV, pages[3], 0)


class TestStandalone(RedisContract):
    @pytest_asyncio.fixture
    async def back(self, tcp_server: RedisServer) -> AsyncIterator[RedisBack]:
        async for back in _lent(OneBack(tcp_server.url, tcp_server), tcp_server):
            yield back


@pytest.fixture(scope="module")
def unix_socket_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with standalone(tmp_path_factory.mktemp("unix"), unix=True) as server:
        yield server


class TestUnixSocket(RedisContract):
    @pytest_asyncio.fixture
    async def back(self, unix_socket_server: RedisServer) -> AsyncIterator[RedisBack]:
        async for back in _lent(OneBack(unix_socket_server.url, unix_socket_server), unix_socket_server):
            yield back


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    with secured(tmp_path_factory.mktemp("tls"), client_certificate=True) as server:
        yield server


class TestTlsAndAcl(RedisContract):
    @pytest_asyncio.fixture
    async def back(self, tls_server: SecuredServer) -> AsyncIterator[RedisBack]:
        url = tls_server.url + tls_server.client_certificate_query
        async for back in _lent(OneBack(url, tls_server.server), tls_server.server):
            yield back


@pytest.fixture(scope="module")
def cluster_of_three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterGroup]:
    with cluster(tmp_path_factory.mktemp("cluster")) as group:
        yield group


class TestLmcacheInACluster(RedisContract):
    @pytest_asyncio.fixture
    async def back(self, cluster_of_three: ClusterGroup) -> AsyncIterator[RedisBack]:
        group = cluster_of_three
        back = LmcacheBack(group.url_of([0]), lambda name: group.nodes[group.owner(name)])
        async for lent in _lent(back, *group.nodes):
            yield lent


class TestCluster(RedisContract):
    @pytest_asyncio.fixture
    async def back(self, cluster_of_three: ClusterGroup) -> AsyncIterator[RedisBack]:
        async for back in _lent(ClusterBack(cluster_of_three), *cluster_of_three.nodes):
            yield back


@pytest.fixture(scope="module")
def sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelGroup]:
    with sentinel(tmp_path_factory.mktemp("sentinel")) as group:
        yield group


class TestSentinel(RedisContract):
    @pytest_asyncio.fixture
    async def back(self, sentinels: SentinelGroup) -> AsyncIterator[RedisBack]:
        primary = sentinels.primary
        async for back in _lent(OneBack(sentinels.url, primary), primary):
            yield back
