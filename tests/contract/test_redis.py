"""The Redis storage keeps the contract on every kind of server."""

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from contract.storage_contract import KV, STATE, Back, Landing, StorageContract, hybrid, keys, store
from forestage.core.layout import ModelLayout
from forestage.storage.redis import RedisStorage
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
