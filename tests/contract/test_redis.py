"""The Redis storage keeps the contract on every kind of server."""

import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import redis

from contract.storage_contract import Back, StorageContract
from forestage.core.layout import ModelLayout
from forestage.storage.redis import RedisStorage


class RedisBack(Back):
    storage: RedisStorage

    def __init__(self, url: str, client: redis.Redis) -> None:
        self.storage = RedisStorage(url)
        self.client = client

    def name(self, model: ModelLayout, component_index: int, key: bytes, shard: int) -> bytes:
        return f"forestage:{model.fingerprint}:{model.components[component_index].name}:{shard}:".encode() + key

    async def get(self, model: ModelLayout, component_index: int, key: bytes, shard: int) -> bytes | None:
        return self.client.get(self.name(model, component_index, key, shard))

    async def put(self, model: ModelLayout, component_index: int, key: bytes, shard: int, value: bytes) -> None:
        self.client.set(self.name(model, component_index, key, shard), value)

    async def remove(self, model: ModelLayout, component_index: int, key: bytes, shard: int) -> None:
        assert self.client.delete(self.name(model, component_index, key, shard)) == 1


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    d = tmp_path_factory.mktemp("redis")
    sock = f"{d}/s"
    p = subprocess.Popen(["redis-server", "--port", "0", "--unixsocket", sock, "--save", "", "--dir", str(d)], stdout=subprocess.DEVNULL)
    while True:
        try:
            c = redis.Redis.from_url(f"unix://{sock}"); c.ping(); break
        except redis.RedisError: time.sleep(0.02)
    yield f"unix://{sock}"
    p.terminate()
    p.wait()


class TestUnix(StorageContract):
    @pytest_asyncio.fixture
    async def back(self, server: str) -> AsyncIterator[RedisBack]:
        with redis.Redis.from_url(server) as client:
            client.flushall()
            back = RedisBack(server, client)
            yield back
            back.storage.check_integrity()
            await back.storage.aclose()
