"""The Redis component as users set it up: TLS, the shipped ACL, the URL in the environment, a prefetch through them."""

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.places import DEPLOY
from deploy.rendering import render_variant
from forestage.assembly import build_storage
from forestage.config import load
from forestage_client import Client
from support.certificates import Certificates, make_certificates
from support.configs import write_config
from support.redis_process import RedisServer, redis_server_or_skip
from support.running import running

KEYS = [hashlib.sha256(bytes([i])).digest() for i in range(8)]
PASSWORD = "pa/ss@word:1"
ENCODED = "pa%2Fss%40word%3A1"


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path / "tls")


@pytest.fixture
def server(tmp_path: Path, certificates: Certificates) -> Iterator[RedisServer]:
    """A server with TLS, and beside the shipped users one for this test to look with."""
    redis_server_or_skip()
    shipped = (DEPLOY / "components" / "redis" / "users.acl").read_text()
    acl = tmp_path / "users.acl"
    acl.write_text(shipped.replace(">PASSWORD", f">{PASSWORD}") + "user admin on >root ~* &* +@all\n")
    tls = ["--tls-cert-file", str(certificates.server), "--tls-key-file", str(certificates.server_key)]
    tls += ["--tls-ca-cert-file", str(certificates.ca), "--tls-auth-clients", "no"]
    options = {"ssl_ca_certs": str(certificates.ca)}
    with RedisServer(tmp_path, "--aclfile", str(acl), tls=tls, admin="admin:root", client_options=options) as server:
        yield server


def test_a_prefetch_through_tls_and_acl(
    tmp_path: Path, scratch: Path, server: RedisServer, certificates: Certificates
) -> None:
    names = {variable["name"]: variable for variable in render_variant("vllm", scratch).sidecar["env"]}
    url = f"{server.url_of(f'forestage:{ENCODED}')}?ssl_ca_certs={certificates.ca}"
    environ = {
        "FORESTAGE_STORAGE__KIND": names["FORESTAGE_STORAGE__KIND"]["value"],
        "FORESTAGE_STORAGE__REDIS__URL": url,
    }
    path = write_config(tmp_path)
    config = load(str(path), environ)

    async def put() -> None:
        storage = build_storage(config)
        await storage.open()
        for key in KEYS:
            await storage.write(config.layouts()[0], 0, key, [memoryview(key * 128)])
        await storage.aclose()

    asyncio.run(put())
    with running(path, environ=environ) as service, Client(service.url, timeout_s=30) as client:
        assert service.ready.endswith("storage=redis")
        job = client.prefetch("m", KEYS, wait_ms=20_000)
        assert (job.outcome, job.pages.ready, job.loaded) == ("complete", 8, 8)
        assert service.stop() == 0
        assert PASSWORD not in "".join(service.log)
        assert ENCODED not in "".join(service.log)
