"""A small scriptable Redis for the replies that a real one does not give on demand.

It speaks RESP2 and keeps values in a dictionary. Law: commands of one connection are answered in their order, each is
logged before it is answered, and a script decides about one command at most.
"""

import contextlib
import fnmatch
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from redis.crc import key_slot

from support.redis_process import free_port
from support.resp import array, bulk, error, number, read_command

__all__ = ["Command", "RedisStub", "Reply", "StubCluster"]

Reply = bytes | Callable[[Sequence[bytes]], bytes | Iterable[bytes]]
_SLOTS = 16384
_KEYED = {b"GET", b"SET", b"EXISTS", b"DEL", b"UNLINK", b"STRLEN", b"TTL", b"TYPE", b"GETRANGE", b"MGET"}


@dataclass(frozen=True, slots=True)
class Command:
    """What came in, when (monotonic seconds) and on which connection (they are numbered from 1)."""

    at: float
    connection: int
    words: tuple[bytes, ...]

    @property
    def name(self) -> str:
        return self.words[0].upper().decode()


@dataclass(slots=True)
class _Script:
    name: bytes
    key: bytes | None
    reply: Reply | None
    times: int | None
    delay_s: float
    pace_s: float
    cut_after: int | None
    released: threading.Event = field(default_factory=threading.Event)

    def meets(self, words: Sequence[bytes]) -> bool:
        if self.times == 0 or self.name not in {b"*", words[0].upper()}:
            return False
        return self.key is None or self.key in words[1:]


class RedisStub:
    """One scripted server. `values` may be changed at any time; `log` holds every command that came."""

    def __init__(self, cluster: "StubCluster | None" = None) -> None:
        self.port = free_port()
        self.values: dict[bytes, bytes] = {}
        self.log: list[Command] = []
        self.accepted = 0
        self.cluster = cluster
        self._lock = threading.RLock()
        self._scripts: list[_Script] = []
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self._closing = threading.Event()

    @property
    def url(self) -> str:
        """The URL of database 0."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def open(self) -> int:
        """How many connections are open."""
        with self._lock:
            return len(self._sockets)

    def count(self, *names: str) -> int:
        """Return how often commands of these names came."""
        with self._lock:
            return sum(command.name in names for command in self.log)

    def commands(self, *names: str) -> list[Command]:
        """Return the commands of these names, in the order in which they came."""
        with self._lock:
            return [command for command in self.log if command.name in names]

    # ---- scripts

    def on(
        self,
        name: str,
        reply: Reply | None = None,
        *,
        key: bytes | None = None,
        times: int | None = None,
        delay_s: float = 0.0,
        pace_s: float = 0.0,
        hold: bool = False,
        cut_after: int | None = None,
    ) -> None:
        """Answer commands like this from now on; of several scripts that fit the latest counts.

        Args:
            name: of the command, `*` for all.
            reply: what to send instead: bytes as they go out, or a function of the words that returns bytes, or pieces
                of them without end. None: what it would answer anyway.
            key: only for commands with this argument.
            times: only for so many commands.
            delay_s: wait so long before the reply, on this connection.
            pace_s: send the reply in pieces of 64 KiB with such a pause before each.
            hold: answer only after `release`.
            cut_after: end the connection after so many bytes of the reply.
        """
        script = _Script(name.upper().encode(), key, reply, times, delay_s, pace_s, cut_after)
        if not hold:
            script.released.set()
        with self._lock:
            self._scripts.insert(0, script)

    def release(self) -> None:
        """Let everything go on that is held."""
        with self._lock:
            for script in self._scripts:
                script.released.set()

    def heal(self) -> None:
        """Forget all scripts, let go what is held, and listen."""
        self.release()
        with self._lock:
            self._scripts.clear()
        if self._listener is None:
            self._listen()

    def refuse(self) -> None:
        """Refuse new connections and end the open ones."""
        self._stop_listening()
        self.drop()

    def drop(self) -> None:
        """End all open connections."""
        with self._lock:
            sockets = list(self._sockets)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    # ---- life

    def __enter__(self) -> Self:
        self._listen()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self.release()
        self.refuse()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=128)
        self._start(self._accept, self._listener)

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
            listener.close()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self.accepted += 1
                self._sockets.add(sock)
            self._start(self._serve, sock, self.accepted)

    def _serve(self, sock: socket.socket, connection: int) -> None:
        asking = False
        try:
            with sock.makefile("rb") as stream:
                while words := read_command(stream):
                    with self._lock:
                        self.log.append(Command(time.monotonic(), connection, words))
                        script = self._take_script(words)
                        reply = self._moved(words, asking) or self._reply(words)
                    asking = words[0].upper() == b"ASKING"
                    if not self._send(sock, words, reply, script):
                        return
        except (OSError, ValueError):
            pass
        finally:
            with self._lock:
                self._sockets.discard(sock)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _take_script(self, words: Sequence[bytes]) -> _Script | None:
        script = next((script for script in self._scripts if script.meets(words)), None)
        if script is not None and script.times is not None:
            script.times -= 1
        return script

    def _send(self, sock: socket.socket, words: Sequence[bytes], reply: bytes, script: _Script | None) -> bool:
        """Send a reply as the script says; False when the connection is to end."""
        if script is None:
            sock.sendall(reply)
            return True
        self._closing.wait(script.delay_s)
        script.released.wait()
        pieces: Iterable[bytes] = [reply]
        if script.reply is not None:
            made = script.reply(words) if callable(script.reply) else script.reply
            pieces = [made] if isinstance(made, bytes) else made
        left = script.cut_after
        for piece in _paced(pieces, script.pace_s, self._closing):
            part = piece if left is None else piece[:left]
            sock.sendall(part)
            if left is not None:
                left -= len(part)
            if left == 0 or self._closing.is_set():
                return False
        return left is None

    # ---- what it answers by itself

    def _moved(self, words: Sequence[bytes], asking: bool) -> bytes | None:
        if self.cluster is None or words[0].upper() not in _KEYED or asking:
            return None
        owner = self.cluster.owner(words[1])
        if owner is self:
            return None
        return error(f"MOVED {key_slot(words[1])} 127.0.0.1:{owner.port}")

    def _reply(self, words: Sequence[bytes]) -> bytes:
        name, arguments = words[0].upper(), words[1:]
        if name == b"HELLO":
            return error("NOPROTO unsupported protocol version") if arguments[:1] == (b"3",) else array([])
        if name == b"SET":
            self.values[arguments[0]] = arguments[1]
            return b"+OK\r\n"
        if name == b"GET":
            return bulk(self.values.get(arguments[0]))
        if name == b"MGET":
            return array([bulk(self.values.get(key)) for key in arguments])
        if name == b"EXISTS":
            return number(sum(key in self.values for key in arguments))
        if name in {b"DEL", b"UNLINK"}:
            return number(sum(self.values.pop(key, None) is not None for key in arguments))
        if name == b"STRLEN":
            return number(len(self.values.get(arguments[0], b"")))
        if name == b"SCAN":
            return self._scan(arguments)
        if name == b"PING":
            return b"+PONG\r\n"
        if name == b"ROLE":
            return array([bulk(b"master"), number(0), array([])])
        if name == b"INFO":
            return bulk(b"redis_version:7.0.15\r\nrole:master\r\nloading:0\r\n")
        if name == b"CLUSTER":
            return self._cluster(arguments)
        if name == b"COMMAND":
            flags = array([b"+readonly\r\n"])
            return array([array([bulk(word.lower()), number(-2), flags, *map(number, (1, 1, 1))]) for word in _KEYED])
        if name in {b"SELECT", b"AUTH", b"CLIENT", b"ASKING", b"READONLY", b"READWRITE", b"QUIT"}:
            return b"+OK\r\n"
        return error(f"ERR unknown command '{name.decode(errors='replace')}'")

    def _scan(self, arguments: Sequence[bytes]) -> bytes:
        words = [word.upper() for word in arguments]
        pattern = arguments[words.index(b"MATCH") + 1].decode() if b"MATCH" in words else "*"
        keys = [key for key in self.values if fnmatch.fnmatchcase(key.decode("latin-1"), pattern)]
        return array([bulk(b"0"), array([bulk(key) for key in keys])])

    def _cluster(self, arguments: Sequence[bytes]) -> bytes:
        if self.cluster is None:
            return error("ERR This instance has cluster support disabled")
        match arguments[0].upper():
            case b"SLOTS":
                return self.cluster.slots_reply()
            case b"MYID":
                return bulk(b"%040d" % self.port)
            case b"INFO":
                return bulk(b"cluster_enabled:1\r\ncluster_state:ok\r\n")
        return error(f"ERR unknown subcommand '{arguments[0].decode(errors='replace')}'")


class StubCluster:
    """Scripted masters that share the slots evenly; `announced` replaces the address that they tell of a node."""

    def __init__(self, nodes: int = 3) -> None:
        self.nodes = [RedisStub(self) for _ in range(nodes)]
        self.owners = [number * nodes // _SLOTS for number in range(_SLOTS)]
        self.announced: dict[int, tuple[str, int]] = {}

    @property
    def url(self) -> str:
        """The URL that names every node."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def owner(self, key: bytes) -> RedisStub:
        """Return the node that owns a key now."""
        return self.nodes[self.owners[key_slot(key)]]

    def number_of(self, key: bytes) -> int:
        """Return the number of the node that owns a key now."""
        return self.owners[key_slot(key)]

    def give(self, slot: int, to: int) -> None:
        """Make another node the owner of a slot; values stay where they are."""
        self.owners[slot] = to

    def put(self, key: bytes, value: bytes) -> None:
        """Put a value where its key belongs now."""
        self.owner(key).values[key] = value

    def slots_reply(self) -> bytes:
        """Return what CLUSTER SLOTS answers."""
        replies = []
        first = 0
        for slot in range(1, _SLOTS + 1):
            if slot == _SLOTS or self.owners[slot] != self.owners[first]:
                number_ = self.owners[first]
                host, port = self.announced.get(number_, ("127.0.0.1", self.nodes[number_].port))
                node = array([bulk(host.encode()), number(port), bulk(b"%040d" % self.nodes[number_].port), array([])])
                replies.append(array([number(first), number(slot - 1), node]))
                first = slot
        return array(replies)

    def __enter__(self) -> Self:
        for node in self.nodes:
            node.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.__exit__()


def _paced(pieces: Iterable[bytes], pace_s: float, stop: threading.Event) -> Iterator[bytes]:
    if not pace_s:
        yield from pieces
        return
    for piece in pieces:
        for at in range(0, len(piece), 1 << 16):
            stop.wait(pace_s)
            yield piece[at : at + (1 << 16)]
