"""How connections are made: what the servers ask for is given, what is refused is said, certificates are renewed."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.storage_contract import KV, LOADED, Landing, hybrid, keys, store
from forestage.core.errors import StartError, StorageUnavailableError
from forestage.storage.redis import RedisStorage
from forestage.storage.redis.door import Door
from forestage.storage.redis.sentinel import Sentinels
from forestage.storage.redis.tls import TlsSettings
from support.redis_servers import SecuredServer, SentinelGroup, secured, sentinel
from support.redis_stub import RedisStub

MODEL, PAGES = hybrid(), keys(2)
OTHER_NAME = "127.1"  # the same address, but not in the server's certificate


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    with secured(tmp_path_factory.mktemp("tls"), client_certificate=True) as server:
        yield server


async def _opens(url: str) -> None:
    storage = RedisStorage(url)
    try:
        await storage.open()
        await store(storage, MODEL, KV, *PAGES)
        assert await Landing(MODEL, KV, PAGES).read(storage) == [LOADED] * 2
    finally:
        await storage.aclose()


async def test_user_password_and_client_certificate(server: SecuredServer) -> None:
    await _opens(server.url + server.client_certificate_query)


@pytest.mark.parametrize("lacking", ["authority", "certificate", "password", "user", "name"])
async def test_who_lacks_something_is_not_let_in(server: SecuredServer, lacking: str) -> None:
    url = server.url + server.client_certificate_query
    match lacking:
        case "authority":
            url = f"{server.plain_url}?{server.client_certificate_query[1:]}"
        case "certificate":
            url = server.url
        case "password":
            url = url.replace(server.password, "wrong")
        case "user":
            url = url.replace(f"{server.user}:", "nobody:")
        case "name":
            url = url.replace("localhost", OTHER_NAME)
    with pytest.raises(StorageUnavailableError) as caught:
        await _opens(url)
    assert server.password not in str(caught.value)


async def test_a_name_that_does_not_fit_can_be_allowed(server: SecuredServer) -> None:
    url = server.url + server.client_certificate_query + "&ssl_check_hostname=false"
    await _opens(url.replace("localhost", OTHER_NAME))


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile", "ssl_keyfile"])
async def test_a_file_that_is_not_there_stops_the_start(tmp_path: Path, option: str) -> None:
    storage = RedisStorage(f"rediss://127.0.0.1:1?{option}={tmp_path}/gone.pem")
    with pytest.raises(StartError, match=f"storage.redis.url: {option}: cannot read"):
        await storage.open()
    await storage.aclose()


def test_a_context_is_made_once_until_a_file_changes(server: SecuredServer, tmp_path: Path) -> None:
    own = tmp_path / "client.crt"
    shutil.copy(server.certificates.client, own)
    settings = TlsSettings(
        {
            "ssl_ca_certs": str(server.certificates.ca),
            "ssl_certfile": str(own),
            "ssl_keyfile": str(server.certificates.client_key),
        }
    )
    first = settings.context()
    assert settings.context() is first
    os.utime(own, ns=(1, 1))
    second = settings.context()
    assert second is not first
    assert settings.context() is second
    own.unlink()
    with pytest.raises(OSError, match="No such file"):
        settings.context()


async def test_nothing_is_said_that_users_might_not_be_allowed() -> None:
    with RedisStub() as stub:
        storage = RedisStorage(stub.url.replace("//", "//me:secret@").removesuffix("0") + "3?client_name=sidecar")
        await store(storage, MODEL, KV, PAGES[0])
        await storage.aclose()
        said = [command.words for command in stub.log]
    assert said[:3] == [(b"AUTH", b"me", b"secret"), (b"CLIENT", b"SETNAME", b"sidecar"), (b"SELECT", b"3")]
    assert {words[0] for words in said[3:]} == {b"SET"}


# ---- sentinels


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelGroup]:
    with sentinel(tmp_path_factory.mktemp("sentinel")) as group:
        yield group


def _sentinels(group: SentinelGroup, *, name: str | None = None, before: int | None = None) -> Sentinels:
    addresses = [("127.0.0.1", before)] if before else []
    addresses += [("127.0.0.1", one.port) for one in group.sentinels]
    return Sentinels(addresses, name or group.name, Door({}, tls=False, timeout_s=2.0, patience_s=2.0))


def test_a_dead_sentinel_costs_its_time_once(group: SentinelGroup) -> None:
    with RedisStub() as dead:
        dead.on("*", cut_after=0)
        sentinels = _sentinels(group, before=dead.port)
        for _ in range(3):
            assert sentinels.locate() == ("127.0.0.1", group.primary.port)
        assert dead.accepted == 1


def test_a_name_that_no_sentinel_knows(group: SentinelGroup) -> None:
    with pytest.raises(StorageUnavailableError, match="no sentinel knows 'other'"):
        _sentinels(group, name="other").locate()


def test_a_replica_is_no_primary(group: SentinelGroup) -> None:
    door = Door({}, tls=False, timeout_s=2.0, patience_s=2.0)
    door.open(("127.0.0.1", group.primary.port), only_primary=True).close()
    with pytest.raises(StorageUnavailableError, match="slave"):
        door.open(("127.0.0.1", group.replica.port), only_primary=True)
