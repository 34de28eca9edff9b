"""How connections to a server are made: redis-py looks up the address, does TLS, AUTH and SELECT, and lets go of it.

Its retries and RESP3 are off: a retry would multiply every limit, and RESP3 has other replies and unasked ones.
"""

import socket
from collections.abc import Mapping
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry

from forestage.storage.redis.errors import LinkError
from forestage.storage.redis.link import Link

__all__ = ["Address", "Door"]

Address = tuple[str, int]


class _Detachable(AbstractConnection):
    def detach(self) -> socket.socket:
        """Return the connected socket and forget it: nobody else closes it now."""
        sock, self._sock = cast("socket.socket", self._sock), None
        return sock


class _Tcp(_Detachable, Connection):
    pass


class _Tls(_Detachable, SSLConnection):
    pass


class _Unix(_Detachable, UnixDomainSocketConnection):
    host = ""  # an abstract property that redis-py leaves undefined here


class Door:
    """Opens links with the credentials of one configuration."""

    def __init__(self, options: Mapping[str, Any], *, tls: bool, timeout_s: float, patience_s: float) -> None:
        """Connect to nothing yet.

        Args:
            options: keyword arguments of redis-py's connections: credentials, database, TLS files.
            tls: whether to use TLS.
            timeout_s: for connecting, and for each answer during the handshake.
            patience_s: how long a link waits for the next byte.
        """
        self._options = dict(options)
        self._tls = tls
        self._timeout_s = timeout_s
        self._patience_s = patience_s

    def open(self, address: Address) -> Link:
        """Connect, authenticate and select the database; port 0 means that the host is a unix socket. Blocking.

        Raises LinkError.
        """
        common: dict[str, Any] = {
            **self._options,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "socket_connect_timeout": self._timeout_s,
            "socket_timeout": self._timeout_s,
            "driver_info": None,
        }
        host, port = address
        kind: type[_Detachable] = _Unix if port == 0 else _Tls if self._tls else _Tcp
        place = {"path": host} if port == 0 else {"host": host, "port": port}
        try:
            connection = kind(**place, **common)
            connection.connect()  # type: ignore[no-untyped-call]
        except (redis.RedisError, OSError, ValueError) as error:
            raise LinkError(f"cannot connect to {host}{f':{port}' if port else ''}: {error}") from error
        return Link(connection.detach(), self._patience_s)
