"""That the proxy does what it is told, before a real server."""

import socket
import time
from collections.abc import Iterator

import pytest
import redis

from support.fault_proxy import FaultProxy
from support.redis_servers import RedisServer, redis_server

__all__ = ["redis_server"]

SIZE = 1 << 20


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[FaultProxy]:
    redis_server.command("SET", "big", b"x" * SIZE)
    with FaultProxy(redis_server.port) as proxy:
        yield proxy


def _connect(proxy: FaultProxy, timeout_s: float = 5.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=timeout_s)


def _read(sock: socket.socket, size: int) -> int:
    """Receive until `size` bytes, the end or the time-out; return how many came."""
    got = 0
    try:
        while got < size and (piece := sock.recv(1 << 16)):
            got += len(piece)
    except TimeoutError:
        pass
    return got


def test_passes_everything_on_and_counts(proxy: FaultProxy) -> None:
    with redis.Redis(port=proxy.port, protocol=2) as client:
        assert client.get("big") == b"x" * SIZE
        assert (proxy.accepted, proxy.open) == (1, 1)
    assert proxy.replies > SIZE
    assert proxy.requests > 0


def test_delay(proxy: FaultProxy) -> None:
    with _connect(proxy) as sock:
        proxy.delay(0.1)
        began = time.monotonic()
        sock.sendall(b"PING\r\n")
        assert sock.recv(100) == b"+PONG\r\n"
        assert 0.09 < time.monotonic() - began < 2
        proxy.heal()


def test_throttle(proxy: FaultProxy) -> None:
    with _connect(proxy) as sock:
        proxy.throttle(4e6)
        began = time.monotonic()
        sock.sendall(b"GET big\r\n")
        assert _read(sock, SIZE + 12) >= SIZE
        assert 0.15 < time.monotonic() - began < 5


def test_hold_in_the_middle_of_a_reply_and_go_on(proxy: FaultProxy) -> None:
    with _connect(proxy, 0.1) as sock:
        proxy.hold(after=1000)
        sock.sendall(b"GET big\r\n")
        assert _read(sock, SIZE) == 1000
        proxy.heal()
        sock.settimeout(5)
        assert 1000 + _read(sock, SIZE + 12 - 1000) == SIZE + 12


def test_cut_by_an_end_and_by_a_reset(proxy: FaultProxy) -> None:
    with _connect(proxy) as sock:
        proxy.cut(after=1000)
        sock.sendall(b"GET big\r\n")
        assert _read(sock, SIZE) == 1000
    proxy.heal()
    with _connect(proxy) as sock:
        proxy.cut(after=1000, reset=True)
        sock.sendall(b"GET big\r\n")
        with pytest.raises(ConnectionResetError):
            _read(sock, SIZE)


def test_black_hole_accepts_and_says_nothing(proxy: FaultProxy) -> None:
    with _connect(proxy, 0.1) as early:
        early.sendall(b"PING\r\n")
        assert early.recv(100) == b"+PONG\r\n"
        proxy.black_hole()
        early.sendall(b"PING\r\n")
        with _connect(proxy, 0.1) as late:
            late.sendall(b"PING\r\n")
            assert (_read(early, 7), _read(late, 7)) == (0, 0)
            proxy.heal()
            early.settimeout(5)
            late.settimeout(5)
            assert (_read(early, 7), _read(late, 7)) == (7, 7)


def test_refuse_and_listen_again(proxy: FaultProxy) -> None:
    with _connect(proxy) as sock:
        sock.sendall(b"PING\r\n")
        assert sock.recv(100) == b"+PONG\r\n"
        proxy.refuse()
        assert sock.recv(100) == b""
    with pytest.raises(ConnectionRefusedError):
        _connect(proxy)
    proxy.heal()
    with _connect(proxy) as sock:
        sock.sendall(b"PING\r\n")
        assert sock.recv(100) == b"+PONG\r\n"


def test_reset_of_a_waiting_connection(proxy: FaultProxy) -> None:
    with _connect(proxy) as sock:
        sock.sendall(b"PING\r\n")
        assert sock.recv(100) == b"+PONG\r\n"
        proxy.drop(reset=True)
        with pytest.raises(ConnectionResetError):
            sock.recv(100)


def test_speed(proxy: FaultProxy) -> None:
    """Slow enough to be a bottleneck in no test: well above 100 MB/s."""
    with redis.Redis(port=proxy.port, protocol=2) as client:
        began = time.monotonic()
        for _ in range(50):
            client.get("big")
        assert 50 * SIZE / (time.monotonic() - began) > 1e8
