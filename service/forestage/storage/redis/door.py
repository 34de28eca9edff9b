"""How connections to a server are made: redis-py looks up the address, connects, logs in, and lets go of the socket.

Its retries and RESP3 are off: a retry would multiply every limit, and RESP3 has other replies and unasked ones.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, Connection, UnixDomainSocketConnection
from redis.exceptions import NoPermissionError
from redis.retry import Retry

from forestage.storage.envelope import TRAILER_BYTES
from forestage.storage.redis.errors import LinkError
from forestage.storage.redis.link import Link
from forestage.storage.redis.tls import TLS_OPTIONS, TlsSettings

__all__ = ["Address", "Door", "Session"]

Address = tuple[str, int]  # host and port; port 0 makes the host a socket's path


class _Detachable(AbstractConnection):
    def detach(self) -> socket.socket:
        """Return the connected socket and forget it: nobody else closes it now."""
        sock, self._sock = cast("socket.socket", self._sock), None
        return sock


class _Tcp(_Detachable, Connection):
    pass


class _Tls(_Detachable, Connection):
    def __init__(self, settings: TlsSettings, **options: Any) -> None:
        self._settings = settings
        super().__init__(**options)  # type: ignore[no-untyped-call]

    def _connect(self) -> socket.socket:
        sock = super()._connect()  # type: ignore[no-untyped-call]
        try:
            return self._settings.context().wrap_socket(sock, server_hostname=self.host)
        except BaseException:
            sock.close()
            raise


class _Unix(_Detachable, UnixDomainSocketConnection):
    host = ""  # an abstract property that redis-py leaves undefined here


class Session:
    """A connection for small commands, one at a time."""

    def __init__(self, connection: _Detachable) -> None:
        self._connection = connection

    def ask(self, *words: str | bytes | int) -> Any:
        """Return the reply to a command as redis-py parses it. Raises redis.RedisError."""
        self._connection.send_command(*words)  # type: ignore[no-untyped-call]
        return self._connection.read_response()

    def ask_all(self, commands: Sequence[Sequence[str | bytes | int]]) -> list[Any]:
        """Return the replies to commands that are sent together, an error reply as the exception that it is."""
        self._connection.send_packed_command(self._connection.pack_commands(commands))  # type: ignore[no-untyped-call]
        replies: list[Any] = []
        for _ in commands:
            try:
                replies.append(self._connection.read_response())
            except redis.ResponseError as error:
                replies.append(error)
        return replies


class Door:
    """Opens connections with the credentials of one configuration. Blocking; for threads."""

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        tls: bool,
        timeout_s: float,
        patience_s: float,
        trailer_bytes: int = TRAILER_BYTES,
    ) -> None:
        """Connect to nothing yet.

        Args:
            options: keyword arguments of redis-py's connections: credentials, database, TLS files.
            tls: whether to use TLS.
            timeout_s: for connecting, and for each answer of a session.
            patience_s: how long a link waits for the next byte.
            trailer_bytes: what values have behind their payload.
        """
        self._options = {name: value for name, value in options.items() if name not in TLS_OPTIONS}
        self._tls = TlsSettings(options) if tls else None
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._trailer_bytes = trailer_bytes

    def open(self, address: Address, *, only_primary: bool = False) -> Link:
        """Connect, authenticate and select the database.

        Raises LinkError; with `only_primary` also when the server says that it is something else.
        """
        with _as_link_error(address):
            connection = self._connect(address)
            try:
                if only_primary:
                    _require_primary(Session(connection))
                return Link(connection.detach(), self._patience_s, self._trailer_bytes)
            finally:
                connection.disconnect()  # type: ignore[no-untyped-call]  # closes nothing that was detached

    @contextlib.contextmanager
    def session(self, address: Address) -> Iterator[Session]:
        """Connect for small commands. What redis-py raises inside becomes a LinkError."""
        with _as_link_error(address):
            connection = self._connect(address)
            try:
                yield Session(connection)
            finally:
                connection.disconnect()  # type: ignore[no-untyped-call]

    def _connect(self, address: Address) -> _Detachable:
        host, port = address
        kind: Callable[..., _Detachable]
        if port == 0:
            kind = partial(_Unix, path=host)
        elif self._tls is None:
            kind = partial(_Tcp, host=host, port=port)
        else:
            kind = partial(_Tls, self._tls, host=host, port=port)
        connection = kind(
            **self._options,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_connect_timeout=self._timeout_s,
            socket_timeout=self._timeout_s,
            driver_info=None,
        )
        connection.connect()  # type: ignore[no-untyped-call]
        return connection


@contextlib.contextmanager
def _as_link_error(address: Address) -> Iterator[None]:
    try:
        yield
    except (redis.RedisError, OSError, ValueError) as error:
        where = f"{address[0]}:{address[1]}" if address[1] else address[0]
        raise LinkError(f"cannot use {where}: {error}") from error


def _require_primary(session: Session) -> None:
    try:
        role = session.ask("ROLE")[0]
    except NoPermissionError:
        return  # users need not be allowed to ask; the sentinels named this one
    if role != b"master":
        raise redis.ReadOnlyError(f"the sentinels named it, but it is a {role.decode()}")
