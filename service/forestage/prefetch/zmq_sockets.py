"""The two ZeroMQ sockets of the publisher, and the one place that imports pyzmq.

Law: nothing here waits for a peer. What a subscriber does not take in time is dropped for it alone, and what somebody
who asked for a replay has no room for is refused.
"""

import asyncio
from typing import TYPE_CHECKING, Any

from forestage.core.batch_log import Batch
from forestage.core.errors import StartError

if TYPE_CHECKING:
    import zmq

__all__ = ["PeerGoneError", "ReplayRequest", "ZmqSockets"]

# Messages due to one peer; a batch has 20 KiB at most, and usually far less.
_SUBSCRIBER_HWM = 1000
_REPLAY_HWM = 256
_REQUESTS_HWM = 64
_LAST_MESSAGES_MS = 100  # for peers to take what is due, when all ends
_MAX_REQUEST = 1024  # bytes
_END = (-1).to_bytes(8, "big", signed=True)

#: Who asks, and from which number on.
ReplayRequest = tuple[bytes, int]


class PeerGoneError(Exception):
    """Who asked for a replay has left."""


class ZmqSockets:
    """A PUB and, with a second endpoint, a ROUTER socket. Belongs to one event loop."""

    def __init__(self, endpoint: str, replay_endpoint: str = "") -> None:
        """Bind them. Raises StartError if pyzmq is not installed, or an endpoint cannot be had."""
        try:
            import zmq
            import zmq.asyncio
        except ImportError as error:
            raise StartError(f'events.publish: pip install "forestage[zmq]" first ({error})') from error
        self._zmq = zmq
        self._context = zmq.asyncio.Context()
        #: Where they are bound, with the port that was picked if none was named.
        self.endpoint = self.replay_endpoint = ""
        self._replay: zmq.asyncio.Socket | None = None
        try:
            # A plain socket: publishing never waits.
            self._publish: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.PUB)
            self.endpoint = self._bind(self._publish, endpoint, _SUBSCRIBER_HWM, "events.endpoint")
            if replay_endpoint:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.setsockopt(zmq.RCVHWM, _REQUESTS_HWM)
                self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # tells which peers are full or gone
                self.replay_endpoint = self._bind(self._replay, replay_endpoint, _REPLAY_HWM, "events.replay_endpoint")
        except BaseException:
            self._close()
            self._context.term()
            raise

    def _bind(self, socket: "zmq.Socket[Any]", endpoint: str, hwm: int, key: str) -> str:
        zmq = self._zmq
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.LINGER, _LAST_MESSAGES_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST)  # what comes from peers
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise StartError(f"{key}: cannot bind {endpoint}: {error}") from error
        return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def publish(self, batch: Batch) -> None:
        """Send a batch to whoever subscribed to its topic and is not behind by too much."""
        self._publish.send_multipart([batch.topic, batch.number.to_bytes(8, "big"), batch.payload], self._zmq.NOBLOCK)

    async def next_request(self) -> ReplayRequest:
        """Wait for somebody to ask for a replay. What is no request is passed over."""
        assert self._replay is not None
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) == 3 and not frames[1] and len(frames[2]) == 8:
                return frames[0], int.from_bytes(frames[2], "big")

    async def answer(self, peer: bytes, batch: Batch | None) -> bool:
        """Send a batch, or with None the end of a replay; False if the peer has no room now. Raises PeerGoneError."""
        assert self._replay is not None
        if batch is None:
            frames = [peer, b"", b"", _END, b""]
        else:
            frames = [peer, b"", batch.topic, batch.number.to_bytes(8, "big"), batch.payload]
        try:
            await self._replay.send_multipart(frames, self._zmq.NOBLOCK)
        except self._zmq.Again:
            return False
        except self._zmq.ZMQError as error:
            raise PeerGoneError from error
        return True

    async def aclose(self) -> None:
        """Close both, after what peers take in a moment."""
        self._close()
        await asyncio.to_thread(self._context.term)

    def _close(self) -> None:
        self._publish.close()
        if self._replay is not None:
            self._replay.close()
