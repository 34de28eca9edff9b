"""Real Redis servers on loopback, as context managers and fixtures.

Import the fixtures that a test module or a conftest wants by name. Without a redis-server the tests are skipped, or
failed where $CI is set.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.certificates import Certificates, make_certificates
from support.redis_groups import ClusterGroup, SentinelGroup
from support.redis_process import RedisServer, TlsUnsupportedError, find_redis_server, free_port, give_up

__all__ = [
    "ClusterGroup",
    "RedisServer",
    "SecuredServer",
    "SentinelGroup",
    "cluster",
    "cluster_group",
    "find_redis_server",
    "free_port",
    "redis_server",
    "secured",
    "secured_server",
    "sentinel",
    "sentinel_group",
    "standalone",
    "unix_server",
]

_LONGEST_SOCKET_PATH = 100  # the kernel takes 107 bytes


@dataclass(frozen=True, slots=True)
class SecuredServer:
    """A server that speaks TLS only, wants a password, and lets `user` do what the service needs below `prefix`."""

    server: RedisServer
    certificates: Certificates
    prefix: str
    user: str
    password: str

    @property
    def url(self) -> str:
        """The URL for `user`, with the certificate authority named in the query as redis-py does."""
        return f"{self.plain_url}?ssl_ca_certs={self.certificates.ca}"

    @property
    def plain_url(self) -> str:
        """The URL for `user` without a query."""
        return self.server.url_of(f"{self.user}:{self.password}")

    @property
    def client_certificate_query(self) -> str:
        """What to add to `url` where the server wants a certificate of the client."""
        return f"&ssl_certfile={self.certificates.client}&ssl_keyfile={self.certificates.client_key}"


@contextmanager
def standalone(folder: Path, *arguments: str, unix: bool = False, port: int | None = None) -> Iterator[RedisServer]:
    """Run one server on a port, or on a unix socket only."""
    with tempfile.TemporaryDirectory(prefix="redis-") as short:
        if unix and len(str(folder / "redis.sock")) > _LONGEST_SOCKET_PATH:
            folder = Path(short)
        with RedisServer(folder, *arguments, unix=unix, port=port) as server:
            yield server


@contextmanager
def secured(folder: Path, *, prefix: str = "forestage", client_certificate: bool = False) -> Iterator[SecuredServer]:
    """Run one server with TLS and users, and nothing allowed to who gives no password."""
    certificates = make_certificates(folder / "tls")
    user, password = "sidecar", "s3cret"
    allowed = "+@read +@write +@connection +@transaction"
    acl = folder / "users.acl"
    acl.write_text(
        f"user default off\nuser admin on >root ~* &* +@all\n"
        f"user {user} on >{password} resetkeys ~{prefix}:* resetchannels -@all {allowed} -@dangerous +info\n"
    )
    files = {
        "--tls-cert-file": certificates.server,
        "--tls-key-file": certificates.server_key,
        "--tls-ca-cert-file": certificates.ca,
        "--tls-auth-clients": "yes" if client_certificate else "no",
    }
    tls = [word for name, value in files.items() for word in (name, str(value))]
    trust = {
        "ssl_ca_certs": str(certificates.ca),
        "ssl_certfile": str(certificates.client),
        "ssl_keyfile": str(certificates.client_key),
    }
    server = RedisServer(folder, "--aclfile", str(acl), tls=tls, admin="admin:root", client_options=trust)
    try:
        server.start()
    except TlsUnsupportedError:
        give_up("this redis-server has no TLS: apt-get install redis-server")
    try:
        yield SecuredServer(server, certificates, prefix, user, password)
    finally:
        server.kill()


@contextmanager
def sentinel(folder: Path, *, sentinels: int = 1, down_after_ms: int = 300) -> Iterator[SentinelGroup]:
    """Run a primary, its replica, and sentinels."""
    with SentinelGroup(folder, sentinels, down_after_ms) as group:
        yield group


@contextmanager
def cluster(folder: Path, *, node_timeout_ms: int = 1000, full_coverage: bool = False) -> Iterator[ClusterGroup]:
    """Run a cluster of three masters."""
    with ClusterGroup(folder, node_timeout_ms=node_timeout_ms, full_coverage=full_coverage) as group:
        yield group


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server on TCP, empty."""
    with standalone(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def unix_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server on a unix socket, empty."""
    with standalone(tmp_path / "redis", unix=True) as server:
        yield server


@pytest.fixture
def secured_server(tmp_path: Path) -> Iterator[SecuredServer]:
    """A server with TLS and an ACL user, empty."""
    with secured(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def sentinel_group(tmp_path: Path) -> Iterator[SentinelGroup]:
    """A primary with a replica and a sentinel, empty."""
    with sentinel(tmp_path / "redis") as group:
        yield group


@pytest.fixture
def cluster_group(tmp_path: Path) -> Iterator[ClusterGroup]:
    """A cluster of three masters, empty."""
    with cluster(tmp_path / "redis") as group:
        yield group
