"""A TCP proxy of a known speed: `python -m support.slow_link PORT BYTES_PER_S` prints the port it listens on.

Law: all connections and both directions together pass no more than the rate; a piece goes on when those that came
before it have passed, so connections that have more to say get equal parts.
"""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["slow_link"]

_PIECE_BYTES = 32 << 10


class _Rate:
    """When the next bytes may pass."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait(self, num_bytes: int) -> None:
        """Return when so many bytes have passed."""
        with self._lock:
            # What was not used is lost, but for the time that a sleep overshoots.
            begin = max(self._free_at, time.monotonic() - 0.001)
            self._free_at = done = begin + num_bytes / self._bytes_per_s
        time.sleep(max(0.0, done - time.monotonic()))


def _pump(source: socket.socket, sink: socket.socket, rate: _Rate) -> None:
    buffer = bytearray(_PIECE_BYTES)
    with contextlib.suppress(OSError):
        while got := source.recv_into(buffer):
            rate.wait(got)
            sink.sendall(memoryview(buffer)[:got])
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _serve(target_port: int, bytes_per_s: float) -> None:
    rate = _Rate(bytes_per_s)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(listener.getsockname()[1], flush=True)
    while True:
        client, _ = listener.accept()
        server = socket.create_connection(("127.0.0.1", target_port))
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=_pump, args=(source, sink, rate), daemon=True).start()


@contextlib.contextmanager
def slow_link(target_port: int, bytes_per_s: float) -> Iterator[int]:
    """Run a proxy of its own process before a port of loopback; yields the port to connect to."""
    command = [sys.executable, "-m", "support.slow_link", str(target_port), str(bytes_per_s)]
    with subprocess.Popen(command, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True) as proxy:
        try:
            assert proxy.stdout is not None
            yield int(proxy.stdout.readline())
        finally:
            proxy.kill()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), float(sys.argv[2]))
