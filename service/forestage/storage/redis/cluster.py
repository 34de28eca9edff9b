"""A cluster: hash slots spread over primaries, each of which may fail or be replaced by itself.

Law: every slot is with one node of `_nodes` or with none; a node without slots is closed at the next look.
"""

import asyncio
import time
from binascii import crc_hqx
from collections.abc import Callable, Iterable, Sequence

from redis.crc import key_slot

from forestage.core.breaker import Breaker, BreakerState, Ticket
from forestage.core.errors import StorageUnavailableError
from forestage.storage.redis.directory import Detour, Directory
from forestage.storage.redis.door import Address, Door
from forestage.storage.redis.errors import LinkError, ReplyError
from forestage.storage.redis.node import Node
from forestage.storage.redis.slot_map import NUM_SLOTS, SlotRange, parse_slots
from forestage.storage.threads import Job, Threads

__all__ = ["Cluster"]

# Between two looks at the distribution that nobody waits for, or that failures ask for.
_LOOK_AGAIN_S = 0.5
_LOOK_TIMEOUT_S = 0.5
_FIRST_LOOK_TIMEOUT_S = 1.0


class Cluster(Directory):
    """Learns the distribution from whichever node answers, and again whenever it proves wrong or a node fails."""

    follows = True

    def __init__(
        self,
        seeds: Sequence[Address],
        door: Door,
        num_readers: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect to nothing yet.

        Args:
            seeds: some nodes.
            door: opens connections to any node.
            num_readers: how many connections read at once, by node.
            clock: monotonic seconds.
        """
        self._seeds = tuple(seeds)
        self._door = door
        self._num_readers = num_readers
        self._clock = clock
        self._nodes: dict[Address, Node] = {}
        self._breakers: dict[Node, Breaker] = {}
        self._slots: list[Node | None] = [None] * NUM_SLOTS
        self._is_known = False
        self._failure = "no node of the cluster has answered yet"
        self._looked_at = -_LOOK_AGAIN_S
        self._lookers = Threads("redis-slots", 1)
        self._looking: Job[Sequence[SlotRange]] | None = None

    async def ready(self) -> None:
        if not self._is_known:
            await self._look()
            if not self._is_known:
                raise StorageUnavailableError(self._failure)
        elif self._clock() - self._looked_at > _LOOK_AGAIN_S and not self._all_well():
            self._begin_look()

    def nodes_of(self, names: Sequence[bytes]) -> Sequence[Node | None]:
        slots = self._slots
        # What follows a brace in a page key may be a hash tag; nearly all names are without.
        return [slots[key_slot(name) if b"{" in name else crc_hqx(name, 0) % NUM_SLOTS] for name in names]

    def follow(self, error: ReplyError) -> Detour | None:
        # "MOVED 3999 host:port", "ASK 3999 host:port", "TRYAGAIN Multiple keys request during rehashing of slot"
        words = error.text.split()
        if error.code == "READONLY":
            self._begin_look()
            return None
        if error.code == "TRYAGAIN" or len(words) < 3 or not words[1].isdigit() or int(words[1]) >= NUM_SLOTS:
            return None
        host, _, port = words[2].rpartition(":")
        if not port.isdigit() or not host:
            return None
        node = self._node_at((host, int(port)))
        if error.code == "ASK":
            return Detour(node, asking=True)
        self._slots[int(words[1])] = node
        self._begin_look()
        return None

    def admit(self, node: Node) -> Ticket:
        breaker = self._breakers.get(node)
        return breaker.admit(self._clock()) if breaker else Ticket(passed=True)

    def judge(self, node: Node, ticket: Ticket, *, is_well: bool | None) -> None:
        breaker = self._breakers.get(node)
        if breaker is None:
            return
        if is_well is None:
            breaker.abandon(ticket)
        elif is_well:
            breaker.succeed()
        else:
            node.flush()
            breaker.fail(self._clock(), ticket)

    def any_well(self) -> bool:
        return any(breaker.state(self._clock()) is BreakerState.CLOSED for breaker in self._breakers.values())

    async def look_again(self, node: Node) -> None:
        if self._clock() - self._looked_at > _LOOK_AGAIN_S or self._looking is not None:
            await self._look()

    def addresses(self) -> Sequence[Address]:
        return sorted({part.primary for part in self._ask_around(self._seeds)})

    def nodes(self) -> Iterable[Node]:
        return tuple(self._nodes.values())

    async def aclose(self) -> None:
        self._lookers.close()
        await super().aclose()

    def _all_well(self) -> bool:
        return all(breaker.state(self._clock()) is BreakerState.CLOSED for breaker in self._breakers.values())

    async def _look(self) -> None:
        """Wait until the look that runs, or one that begins now, has ended, but not for long."""
        self._begin_look()
        job = self._looking
        if job is not None:
            await asyncio.wait([job.ended], timeout=_LOOK_TIMEOUT_S if self._is_known else _FIRST_LOOK_TIMEOUT_S)

    def _begin_look(self) -> None:
        if self._looking is not None:
            return
        now = self._clock()
        self._looked_at = now
        # Nodes that are well first: one that hangs would cost its whole time.
        well = [a for a, node in self._nodes.items() if self._breakers[node].state(now) is BreakerState.CLOSED]
        candidates = list(dict.fromkeys([*well, *self._seeds, *self._nodes]))
        try:
            job = self._lookers.submit(lambda: self._ask_around(candidates))
        except StorageUnavailableError:
            return
        self._looking = job
        job.ended.add_done_callback(lambda _: self._looked(job))

    def _looked(self, job: "Job[Sequence[SlotRange]]") -> None:
        self._looking = None
        if isinstance(job.result, Sequence):
            self._take_in(job.result)
        else:
            self._failure = str(job.result)

    def _ask_around(self, candidates: Sequence[Address]) -> Sequence[SlotRange]:
        failure: LinkError | None = None
        for address in candidates:
            try:
                with self._door.session(address) as session:
                    ranges = parse_slots(session.ask("CLUSTER", "SLOTS"), address)
            except LinkError as error:
                failure = error
                continue
            if ranges:
                return ranges
        raise StorageUnavailableError(f"no node of the cluster says who has which slots: {failure or 'nobody has any'}")

    def _take_in(self, ranges: Sequence[SlotRange]) -> None:
        slots: list[Node | None] = [None] * NUM_SLOTS
        for part in ranges:
            node = self._node_at(part.primary)
            slots[part.first : part.last + 1] = [node] * (part.last + 1 - part.first)
        self._slots = slots
        self._is_known = True
        needed = set(slots)
        for address, node in list(self._nodes.items()):
            if node not in needed:
                del self._nodes[address], self._breakers[node]
                node.close()

    def _node_at(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            host, port = address
            node = Node(f"{host}:{port}", lambda: self._door.open(address), self._num_readers)
            self._nodes[address] = node
            self._breakers[node] = Breaker(max_failures=1, backoff_s=0.25, backoff_cap_s=2.0)
        return node
