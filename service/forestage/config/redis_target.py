"""What a Redis URL says: which servers, how they belong together, and how to be let in.

    redis://[user:password@]host[:port][/db]              one server; rediss:// for TLS
    unix://[user:password@]/path[?db=1]                   one server on a socket
    redis+cluster://[...@]host[:port],host[:port]         a cluster, by some of its nodes; rediss+cluster://
    redis+sentinel://[...@]host[:port],.../name[/db]      what these sentinels call `name`; rediss+sentinel://

Law: no part of a URL enters the text of an error, since any part may be a misplaced password.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import parse_qsl, unquote

__all__ = ["MASK", "RedisTarget", "RedisTopology", "redis_target", "split_redis_url"]

MASK = "****"
_SHAPE = re.compile(r"([a-z+]+)://([^/?#]*)([^?#]*)(?:\?([^#]*))?")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?")
_SERVICE = re.compile(r"[A-Za-z0-9._-]{1,128}")
_DATABASE = re.compile(r"[0-9]{0,9}")
_BEGINNINGS = "must begin with redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// (TLS: rediss+...)"
_NO_HOST = "must have a host, and a port from 1 to 65535 if any"
_NO_SOCKET = "must name a socket, as unix:///run/redis.sock does"
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

_LOGIN = frozenset({"username", "password", "client_name"})
_TLS = frozenset(
    {
        "ssl_ca_certs",
        "ssl_ca_path",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_password",
        "ssl_cert_reqs",
        "ssl_check_hostname",
        "ssl_ciphers",
    }
)
_SENTINEL_LOGIN = frozenset({"sentinel_username", "sentinel_password"})


class RedisTopology(StrEnum):
    """How the servers of a URL belong together."""

    ONE = "one"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class RedisTarget:
    """The servers of one L3.

    `addresses` are host and port, to begin with; port 0 makes the host a socket's path. `service` is what sentinels
    call the primary. `options` are those that redis-py's connections take: credentials, database, TLS;
    `sentinel_options` the same for the sentinels.
    """

    topology: RedisTopology
    addresses: tuple[tuple[str, int], ...]
    tls: bool = False
    service: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    sentinel_options: Mapping[str, Any] = field(default_factory=dict, repr=False)


def split_redis_url(url: str) -> tuple[str, str, str, str, str | None]:
    """Cut a URL into scheme, user part, hosts, path and query (None without `?`). Raises ValueError."""
    cut = _SHAPE.fullmatch(url)
    # A password with a bare / ? # or @ is split at the wrong place, and half of it would count as no secret.
    if cut is None and "#" not in url:
        raise ValueError(_BEGINNINGS)
    if cut is None or "@" in cut[3] + (cut[4] or "") or cut[2].count("@") > 1 or re.search(r"[][].*@", cut[2]):
        raise ValueError("must have / ? # @ [ ] of user and password percent-encoded")
    user, _, hosts = cut[2].rpartition("@")
    return cut[1], user, hosts, cut[3], cut[4]


def redis_target(url: str) -> RedisTarget:
    """Read a URL. Raises ValueError with a text that begins with what the URL must do and quotes nothing of it."""
    scheme, user, hosts, path, query = split_redis_url(url)
    kind, _, topology_word = scheme.partition("+")
    topology = RedisTopology(topology_word) if topology_word in {"sentinel", "cluster"} else RedisTopology.ONE
    if scheme not in {"redis", "rediss", "unix"} and (kind not in {"redis", "rediss"} or topology is RedisTopology.ONE):
        raise ValueError(_BEGINNINGS)
    tls = kind == "rediss"
    options = _query_options(query or "", topology, tls=tls)
    options.update(_login(user))
    service = ""
    if kind == "unix":
        if hosts or path in ("", "/"):
            raise ValueError(_NO_SOCKET)
        addresses: tuple[tuple[str, int], ...] = ((unquote(path), 0),)
    else:
        port = 26379 if topology is RedisTopology.SENTINEL else 6379
        addresses = tuple(_address(host, port) for host in hosts.split(","))
        if topology is RedisTopology.ONE and len(addresses) > 1:
            raise ValueError(_NO_HOST)
        if topology is RedisTopology.SENTINEL:
            service, _, path = path.removeprefix("/").partition("/")
            if not _SERVICE.fullmatch(service):
                raise ValueError("must have the name that the sentinels give the primary behind the hosts")
        database = path.removeprefix("/")
        if not _DATABASE.fullmatch(database):
            raise ValueError("must have nothing but a database number behind the host")
        options.setdefault("db", int(database or 0))
    if topology is RedisTopology.CLUSTER and options.get("db"):
        raise ValueError("must have no database number: a cluster has one database")
    sentinel_options = {name.removeprefix("sentinel_"): options.pop(name) for name in _SENTINEL_LOGIN & set(options)}
    sentinel_options |= {name: value for name, value in options.items() if name in _TLS}
    return RedisTarget(topology, addresses, tls, service, options, sentinel_options)


def _login(user: str) -> dict[str, str]:
    name, _, password = user.partition(":")
    if password == MASK:
        raise ValueError("has its password masked")
    return {key: unquote(text) for key, text in (("username", name), ("password", password)) if text}


def _address(text: str, default_port: int) -> tuple[str, int]:
    host = _HOST.fullmatch(text)
    port = int(host[3] or default_port) if host else 0
    if host is None or not 1 <= port <= 65535:
        raise ValueError(_NO_HOST)
    return unquote(host[1] or host[2]), port


def _query_options(query: str, topology: RedisTopology, *, tls: bool) -> dict[str, Any]:
    allowed = _LOGIN | {"db"} | (_TLS if tls else set())
    if topology is RedisTopology.SENTINEL:
        allowed |= _SENTINEL_LOGIN
    options: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in allowed:
            raise ValueError(f"may have behind the ? only {', '.join(sorted(allowed))}")
        value = _option(name, text)
        if value is None:
            raise ValueError(f"has a value that {name} cannot have")
        options[name] = value
    return options


def _option(name: str, text: str) -> Any:
    """Return the value of an option, None when it cannot have this one."""
    match name:
        case "db":
            return int(text) if _DATABASE.fullmatch(text) and text else None
        case "ssl_check_hostname":
            return _TRUTH.get(text.lower())
        case "ssl_cert_reqs":
            return text if text in {"none", "optional", "required"} else None
        case _:
            return text or None
