"""Servers that belong together: a primary with its replica and sentinels, and a cluster of masters."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import redis
from redis.crc import key_slot

from support.redis_process import RedisServer, free_port

__all__ = ["ClusterGroup", "SentinelGroup"]

_NUM_SLOTS = 16384
_SETTLE_S = 30.0


def _until(condition: Callable[[], bool], what: str, deadline_s: float = _SETTLE_S) -> None:
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            if condition():
                return
        except redis.RedisError:
            pass  # a server that is on its way up or down
        assert time.monotonic() < deadline, f"not within {deadline_s} s: {what}"
        time.sleep(0.01)


class SentinelGroup:
    """One primary, one replica, and sentinels that notice the primary's death within `down_after_ms`."""

    def __init__(self, folder: Path, sentinels: int = 1, down_after_ms: int = 300, name: str = "pages") -> None:
        self.name = name
        self.servers = [RedisServer(folder / "server-0", "--repl-diskless-sync-delay", "0")]
        primary = ("--replicaof", "127.0.0.1", str(self.servers[0].port), "--repl-diskless-sync-delay", "0")
        self.servers.append(RedisServer(folder / "server-1", *primary))
        self.sentinels = []
        for number in range(sentinels):
            at = folder / f"sentinel-{number}"
            at.mkdir(parents=True)
            config = at / "sentinel.conf"
            quorum = sentinels // 2 + 1
            config.write_text(
                f"sentinel monitor {name} 127.0.0.1 {self.servers[0].port} {quorum}\n"
                f"sentinel down-after-milliseconds {name} {down_after_ms}\n"
                f"sentinel failover-timeout {name} 3000\n"
            )
            self.sentinels.append(_Sentinel(at, config))
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """The URL of database 0 behind the sentinels."""
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{self.name}/0"

    @property
    def primary(self) -> RedisServer:
        """The server that the first sentinel names now."""
        port = int(self.sentinels[0].command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name)[1])
        return next(server for server in self.servers if server.port == port)

    @property
    def replica(self) -> RedisServer:
        """The other one."""
        return next(server for server in self.servers if server is not self.primary)

    def wait_for_copy(self) -> None:
        """Return when the replica has all that the primary has."""
        primary, replica = self.primary, self.replica
        _until(lambda: _offset(primary) == _offset(replica) and _is_linked(replica), "the replica caught up")

    def failover(self, *, kill: bool = True) -> RedisServer:
        """Make the replica the primary, and return it when the sentinels name it and it takes writes.

        With `kill` the old primary dies and the sentinels have to notice; without, they are told to, and it goes on
        as a replica.
        """
        old, new = self.primary, self.replica
        if kill:
            old.kill()
        else:
            # Refused until the sentinel has heard from the replica itself.
            _until(lambda: bool(self.sentinels[0].command("SENTINEL", "FAILOVER", self.name)), "a failover begins")
        _until(lambda: self.primary is new and new.command("ROLE")[0] == b"master", "the replica took over")
        return new

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for server in (*self.servers, *self.sentinels):
                stack.enter_context(server)
            _until(lambda: _is_linked(self.servers[1]), "the replica is connected")
            # A sentinel learns of replicas, and of the other sentinels, by asking and by hearsay.
            known = len(self.sentinels) - 1
            _until(lambda: all(s.knows(self.name, 1, known) for s in self.sentinels), "the sentinels know the group")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class _Sentinel(RedisServer):
    def __init__(self, folder: Path, config: Path) -> None:
        super().__init__(folder)
        self._arguments = [str(config), "--sentinel", "--port", str(self.port), "--bind", "127.0.0.1"]
        self._arguments += ["--logfile", str(self.log), "--dir", str(folder)]

    def knows(self, name: str, replicas: int, sentinels: int) -> bool:
        """Say whether it has heard of so many replicas, all alive, and of so many other sentinels."""
        found = self.command("SENTINEL", "MASTER", name)
        fields = found if isinstance(found, dict) else dict(zip(found[::2], found[1::2], strict=True))
        fields = {_text(field): _text(value) for field, value in fields.items()}
        return int(fields["num-slaves"]) == replicas and int(fields["num-other-sentinels"]) == sentinels


class ClusterGroup:
    """A cluster of masters without replicas, each with its share of the slots.

    What is on a dead node is gone, the rest goes on being served unless `full_coverage` is asked for.
    """

    def __init__(
        self, folder: Path, nodes: int = 3, *, node_timeout_ms: int = 1000, full_coverage: bool = False
    ) -> None:
        self.nodes = []
        for number in range(nodes):
            settings = {
                "--cluster-enabled": "yes",
                "--cluster-config-file": "nodes.conf",
                "--cluster-node-timeout": str(node_timeout_ms),
                "--cluster-announce-ip": "127.0.0.1",
                "--cluster-require-full-coverage": "yes" if full_coverage else "no",
            }
            words = [word for pair in settings.items() for word in pair]
            self.nodes.append(RedisServer(folder / f"node-{number}", *words, port=free_port()))
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """The URL that names every node."""
        return self.url_of(range(len(self.nodes)))

    def url_of(self, numbers: Sequence[int]) -> str:
        """Return a URL that names some of the nodes only."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{self.nodes[number].port}" for number in numbers)

    def owner(self, key: bytes) -> int:
        """Return the number of the node that owns a key by the shares given at the start."""
        return self._owner_of_slot(key_slot(key))

    def _owner_of_slot(self, slot: int) -> int:
        return next(number for number in range(len(self.nodes)) if slot in self._share(number))

    def _share(self, number: int) -> range:
        count = len(self.nodes)
        return range(number * _NUM_SLOTS // count, (number + 1) * _NUM_SLOTS // count)

    def kill(self, number: int) -> None:
        """Kill a node."""
        self.nodes[number].kill()

    def stop(self, number: int) -> None:
        """Freeze a node."""
        self.nodes[number].stop()

    def cont(self, number: int) -> None:
        """Let a frozen node go on."""
        self.nodes[number].cont()

    def restart(self, number: int) -> None:
        """Start a node again with the slots it had and no keys; return when all agree."""
        self.nodes[number].restart()
        self.settle()

    def move_slot(self, slot: int, to: int) -> None:
        """Give a slot to another node, its keys left behind (call `migrate_keys` in between to take them along)."""
        name = _text(self.nodes[to].command("CLUSTER", "MYID"))
        for number in (to, *(other for other in range(len(self.nodes)) if other != to)):
            self.nodes[number].command("CLUSTER", "SETSLOT", slot, "NODE", name)

    def give_back_slot(self, slot: int) -> None:
        """Give a slot back to the node that had it at the start."""
        self.move_slot(slot, self._owner_of_slot(slot))

    def open_slot(self, slot: int, to: int) -> None:
        """Begin to move a slot: its old owner answers ASK for keys that are not there any more."""
        source = self._owner_of_slot(slot)
        names = [_text(node.command("CLUSTER", "MYID")) for node in self.nodes]
        self.nodes[to].command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[source])
        self.nodes[source].command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[to])

    def migrate_keys(self, slot: int, to: int) -> int:
        """Move the keys of an open slot; return how many there were."""
        source = self.nodes[self._owner_of_slot(slot)]
        keys = source.command("CLUSTER", "GETKEYSINSLOT", slot, 100_000)
        if keys:
            source.command("MIGRATE", "127.0.0.1", self.nodes[to].port, "", 0, 5000, "KEYS", *keys)
        return len(keys)

    def settle(self) -> None:
        """Return when every running node says that the cluster is whole."""
        _until(self._is_whole, "the cluster is whole")

    def _is_whole(self) -> bool:
        for node in self.nodes:
            info = _text(node.command("CLUSTER", "INFO"))
            wanted = ("cluster_state:ok", f"cluster_slots_ok:{_NUM_SLOTS}", f"cluster_size:{len(self.nodes)}")
            if not all(line in info for line in wanted):
                return False
        return True

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for node in self.nodes:
                stack.enter_context(node)
            for number, node in enumerate(self.nodes):
                node.command("CLUSTER", "ADDSLOTS", *self._share(number))
                node.command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            for node in self.nodes[1:]:
                self.nodes[0].command("CLUSTER", "MEET", "127.0.0.1", node.port)
            self.settle()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _text(reply: object) -> str:
    # redis-py turns some replies into dictionaries of strings; as lines they read alike.
    if isinstance(reply, dict):
        return "\n".join(f"{name}:{value}" for name, value in reply.items())
    return reply.decode() if isinstance(reply, bytes) else str(reply)


def _offset(server: RedisServer) -> int:
    with server.admin() as client:
        return int(client.info("replication")["master_repl_offset"])


def _is_linked(replica: RedisServer) -> bool:
    with replica.admin() as client:
        return bool(client.info("replication").get("master_link_status") == "up")
