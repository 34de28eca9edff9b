"""That the scripted server is understood by a real client, and does what its scripts say."""

import itertools
import socket
import time
from collections.abc import Iterator

import pytest
import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.retry import Retry

from support.redis_stub import RedisStub, StubCluster
from support.resp import bulk, error


@pytest.fixture
def stub() -> Iterator[RedisStub]:
    with RedisStub() as stub:
        yield stub


def _client(stub: RedisStub, timeout_s: float = 5.0) -> redis.Redis:
    return redis.Redis(port=stub.port, protocol=2, socket_timeout=timeout_s, retry=Retry(NoBackoff(), 0))


def test_serves_values_and_logs_commands(stub: RedisStub) -> None:
    with _client(stub) as client:
        assert client.set("a", b"1\r\n2")
        assert client.get("a") == b"1\r\n2"
        assert client.exists("a", "b") == 1
        assert client.mget("a", "b") == [b"1\r\n2", None]
        assert list(client.scan_iter("a*")) == [b"a"]
        assert client.delete("a") == 1
        assert stub.open == 1
    assert [command.words for command in stub.commands("GET")] == [(b"GET", b"a")]


def test_scripts_count_and_the_latest_wins(stub: RedisStub) -> None:
    stub.values[b"a"] = b"1"
    stub.on("GET", error("LOADING Redis is loading the dataset in memory"))
    stub.on("GET", bulk(b"other"), key=b"a", times=1)
    with _client(stub) as client:
        assert client.get("a") == b"other"
        with pytest.raises(redis.BusyLoadingError):
            client.get("a")
        stub.heal()
        assert client.get("a") == b"1"


def test_delay_hold_and_cut(stub: RedisStub) -> None:
    stub.values[b"a"] = b"x" * 1000
    stub.on("GET", delay_s=0.1, times=1)
    with _client(stub) as client:
        began = time.monotonic()
        assert client.get("a") == b"x" * 1000
        assert time.monotonic() - began > 0.09
    stub.on("GET", hold=True)
    with _client(stub, 0.1) as client, pytest.raises(redis.TimeoutError):
        client.get("a")
    stub.heal()
    stub.on("GET", cut_after=100)
    with _client(stub) as client, pytest.raises(redis.ConnectionError):
        client.get("a")


def test_pieces_without_end(stub: RedisStub) -> None:
    stub.on("GET", lambda _: itertools.chain([b"$4294967296\r\n"], itertools.repeat(b"x" * 65536)))
    with socket.create_connection(("127.0.0.1", stub.port), timeout=5) as sock:
        sock.sendall(b"GET a\r\n")
        got = 0
        while got < 10_000_000:
            got += len(sock.recv(1 << 20))


def test_a_cluster_redirects() -> None:
    with StubCluster() as cluster:
        keys = [f"k{i}".encode() for i in range(30)]
        for key in keys:
            cluster.put(key, b"v" + key)
        with RedisCluster(host="127.0.0.1", port=cluster.nodes[0].port, protocol=2) as client:
            assert [client.get(key) for key in keys] == [b"v" + key for key in keys]
        assert all(node.count("GET") for node in cluster.nodes)
        key = keys[0]
        other = next(node for node in cluster.nodes if node is not cluster.owner(key))
        with _client(other) as direct, pytest.raises(redis.exceptions.MovedError):
            direct.get(key)
