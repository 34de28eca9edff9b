"""What the tests with Redis stand on: that the servers do what they are told."""

import os
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot

from support.redis_servers import (
    ClusterGroup,
    RedisServer,
    SecuredServer,
    cluster_group,
    redis_server,
    secured,
    secured_server,
    sentinel,
    sentinel_group,
    unix_server,
)

__all__ = ["cluster_group", "redis_server", "secured_server", "sentinel_group", "unix_server"]


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_restart_empties_the_memory(redis_server: RedisServer) -> None:
    redis_server.command("SET", "a", "1")
    before = redis_server.pid
    redis_server.restart()
    assert _is_gone(before)
    assert redis_server.command("GET", "a") is None


def test_a_frozen_server_answers_again(redis_server: RedisServer) -> None:
    redis_server.stop()
    with redis_server.admin(socket_timeout=0.05) as client, pytest.raises(redis.TimeoutError):
        client.ping()
    redis_server.cont()
    assert redis_server.command("PING")


def test_a_unix_socket_serves(unix_server: RedisServer) -> None:
    assert unix_server.url.startswith("unix:///")
    with redis.Redis.from_url(unix_server.url) as client:
        assert client.ping()


def test_the_user_may_do_what_is_needed_and_no_more(secured_server: SecuredServer) -> None:
    with redis.Redis.from_url(secured_server.url) as client:
        assert client.set("forestage:a", "1")
        assert client.exists("forestage:a") == 1
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.get("other:a")
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.flushall()
    with redis.Redis.from_url(secured_server.plain_url) as client, pytest.raises(redis.ConnectionError):
        client.ping()


def test_a_client_certificate_can_be_demanded(tmp_path: Path) -> None:
    with secured(tmp_path, client_certificate=True) as server:
        with redis.Redis.from_url(server.url + server.client_certificate_query) as client:
            assert client.ping()
        with redis.Redis.from_url(server.url) as client, pytest.raises(redis.RedisError):
            client.ping()


@pytest.mark.parametrize("kill", [True, False])
def test_a_failover_keeps_the_keys(tmp_path: Path, kill: bool) -> None:
    with sentinel(tmp_path) as group:
        old = group.primary
        old.command("SET", "a", "1")
        group.wait_for_copy()
        new = group.failover(kill=kill)
        assert new is not old
        assert new.command("GET", "a") == b"1"
        assert old.is_running is not kill


def test_a_cluster_moves_slots_and_survives_a_node(cluster_group: ClusterGroup) -> None:
    group = cluster_group
    keys = [f"k{i}".encode() for i in range(30)]
    assert {group.owner(key) for key in keys} == {0, 1, 2}
    for key in keys:
        assert group.nodes[group.owner(key)].command("SET", key, "1")

    moved = keys[0]
    source, slot = group.owner(moved), key_slot(moved)
    target = (source + 1) % 3
    group.open_slot(slot, target)
    assert group.migrate_keys(slot, target) == 1
    with pytest.raises(redis.exceptions.AskError):
        group.nodes[source].command("GET", moved)
    group.move_slot(slot, target)
    with pytest.raises(redis.exceptions.MovedError):
        group.nodes[source].command("GET", moved)
    assert group.nodes[target].command("GET", moved) == b"1"

    group.kill(source)
    for key in keys:
        if group.owner(key) != source:
            assert group.nodes[group.owner(key)].command("GET", key) == b"1"
    group.restart(source)
    lost = next(key for key in keys if group.owner(key) == source and key != moved)
    assert group.nodes[source].command("GET", lost) is None
