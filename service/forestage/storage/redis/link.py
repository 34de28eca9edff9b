"""One connection to a server: a blocking socket with replies, bounded in how long it waits for a byte.

Law: a link is used by one thread at a time; only `shut_down` may be called from others. One that raised a LinkError is
closed, never used again.
"""

import contextlib
import socket
import ssl
import struct
from collections.abc import Callable, Sequence

from forestage.storage.base import Buffer
from forestage.storage.redis.errors import LinkError, QuietError
from forestage.storage.redis.reply_stream import ReplyStream

__all__ = ["Link"]

# A blocked call comes back so often to show progress, and to look whether anybody still wants what it waits for.
_TICK_S = 0.05


class Link:
    """Commands out, replies in, through a connected and authenticated socket, which it owns."""

    def __init__(self, sock: socket.socket, patience_s: float, trailer_bytes: int) -> None:
        """Take over `sock`, which is blocking from now on.

        Args:
            sock: connected; no reply is due on it.
            patience_s: how long to wait for the next byte before giving the connection up.
            trailer_bytes: what values have behind their payload.
        """
        self._sock = sock
        self._max_ticks = max(1, round(patience_s / _TICK_S))
        self._ticks = 0
        #: Called in every pause; what it raises ends the call that waits.
        self.on_pause: Callable[[], None] | None = None
        self.is_closed = False
        #: True once the server has answered anything.
        self.has_answered = False
        if isinstance(sock, ssl.SSLSocket):
            sock.settimeout(_TICK_S)
            self.replies = ReplyStream(self._receive_tls, trailer_bytes, gathers=False)
        else:
            sock.settimeout(None)
            tick = struct.pack("@ll", 0, int(_TICK_S * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
            self.replies = ReplyStream(self._receive, trailer_bytes)

    def is_usable(self) -> bool:
        """Say whether the connection, idle until now, is open and silent as far as that can be told without waiting."""
        if self.is_closed or not self.replies.is_empty:
            return False
        if isinstance(self._sock, ssl.SSLSocket):  # what lies there may be a session ticket
            return True
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def send(self, *buffers: Buffer) -> None:
        """Send all of `buffers`, one after another and without joining them. Raises LinkError."""
        left = [memoryview(buffer) for buffer in buffers if len(buffer)]
        is_tls = isinstance(self._sock, ssl.SSLSocket)
        while left:
            try:
                sent = self._sock.send(left[0]) if is_tls else self._sock.sendmsg(left)
            except (BlockingIOError, TimeoutError):
                self._pause()
                continue
            except (OSError, ValueError) as error:
                raise self._lost(error) from error
            self._ticks = 0
            while left and sent >= len(left[0]):
                sent -= len(left[0])
                del left[0]
            if sent:
                left[0] = left[0][sent:]

    def shut_down(self) -> None:
        """Wake whoever waits on this connection; it is of no use afterwards. From any thread, before `close` only."""
        with contextlib.suppress(OSError):
            # Not the method of SSLSocket, which would turn it into a plain one under the reading thread.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.is_closed = True
        self._sock.close()

    def _receive(self, buffers: Sequence[memoryview], fully: bool) -> int:
        flags = socket.MSG_WAITALL if fully else 0
        while True:
            try:
                got = self._sock.recvmsg_into(buffers, 0, flags)[0]
            except BlockingIOError:
                self._pause()
                continue
            except OSError as error:
                raise self._lost(error) from error
            return self._received(got)

    def _receive_tls(self, buffers: Sequence[memoryview], fully: bool) -> int:
        while True:
            try:
                got = self._sock.recv_into(buffers[0])
            except TimeoutError:
                self._pause()
                continue
            except (OSError, ValueError) as error:
                raise self._lost(error) from error
            return self._received(got)

    def _received(self, got: int) -> int:
        if got == 0:
            raise LinkError("the server closed the connection")
        self._ticks = 0
        self.has_answered = True
        return got

    def _pause(self) -> None:
        self._ticks += 1
        if self._ticks >= self._max_ticks:
            raise QuietError("the server does not answer")
        if self.on_pause is not None:
            self.on_pause()

    def _lost(self, error: Exception) -> LinkError:
        return LinkError(f"the connection broke: {error}")
