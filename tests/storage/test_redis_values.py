"""Values in Redis are those of files, stay as long as they should, and lie below the prefix."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.storage_contract import KV, LOADED, Landing, ask, bits, hybrid, keys, payload, store
from forestage.storage.files import FileStorage
from forestage.storage.redis import RedisStorage
from support.redis_servers import RedisServer, standalone


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with standalone(tmp_path_factory.mktemp("redis")) as server:
        yield server


async def test_a_value_is_the_same_bytes_as_a_file(server: RedisServer, tmp_path: Path) -> None:
    model, key = hybrid(), keys(1)[0]
    redis, files = RedisStorage(server.url, prefix="same"), FileStorage(tmp_path)
    for storage in (redis, files):
        await store(storage, model, KV, key)
        await storage.aclose()
    for shard in range(2):
        path = tmp_path / model.fingerprint / "kv" / key.hex()[:2] / f"{key.hex()}-{shard}.page"
        name = f"same:{model.fingerprint}:kv:{shard}:".encode() + key
        assert server.command("GET", name) == path.read_bytes()
        assert server.command("GET", name)[:4096] == payload(model, KV, key, shard)
        assert server.command("TTL", name) == -1


async def test_values_expire_when_told_so(server: RedisServer) -> None:
    model, key = hybrid(), keys(1)[0]
    storage = RedisStorage(server.url, prefix="brief", ttl_s=100)
    await store(storage, model, KV, key)
    name = f"brief:{model.fingerprint}:kv:1:".encode() + key
    assert 90 < server.command("TTL", name) <= 100
    assert await Landing(model, KV, [key]).read(storage) == [LOADED]
    await storage.aclose()


async def test_prefixes_and_databases_are_apart(server: RedisServer) -> None:
    model, pages = hybrid(), keys(3)
    urls = {"one": server.url, "two": server.url, "three": server.url.removesuffix("0") + "1"}
    prefixes = {"one": "p", "two": "q", "three": "p"}
    storages = {name: RedisStorage(url, prefix=prefixes[name]) for name, url in urls.items()}
    await store(storages["one"], model, KV, *pages)
    for name, storage in storages.items():
        expected = "111" if name == "one" else "000"
        assert bits((await ask(storage, model, pages)).masks[KV]) == expected
        assert len(list(storage.iter_pages(model))) == (3 if name == "one" else 0)
        await storage.aclose()


@pytest.mark.parametrize("odd", [b"{", b"}", b"\r\n", b"*", b"?", b"[a]", b"\\", b"\0"])
async def test_any_bytes_in_keys(server: RedisServer, odd: bytes) -> None:
    model = hybrid()
    pages = [(odd * 20)[:16], odd + b"x" * 20, (b"y" * 20 + odd)[-64:]]
    storage = RedisStorage(server.url, prefix="odd[*]?\\")
    await store(storage, model, KV, *pages)
    assert bits((await ask(storage, model, pages)).masks[KV]) == "111"
    assert await Landing(model, KV, pages).read(storage) == [LOADED] * 3
    assert set(storage.iter_pages(model)) >= {(KV, page) for page in pages}
    assert await storage.delete(model, KV, pages[1])
    assert bits((await ask(storage, model, pages)).masks[KV]) == "100"
    await storage.aclose()
