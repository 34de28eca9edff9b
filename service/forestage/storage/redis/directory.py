"""Which server has which key: the seam between the storage and the ways in which servers belong together.

On the event loop, but for what the threads of a node ask.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from forestage.core.breaker import Ticket
from forestage.storage.redis.door import Address, Door
from forestage.storage.redis.errors import ReplyError
from forestage.storage.redis.node import Node

__all__ = ["Detour", "Directory", "OneServer"]


@dataclass(frozen=True, slots=True)
class Detour:
    """Where a command goes once, whatever the directory says: to `node`, behind an ASKING if `asking`."""

    node: Node
    asking: bool


class Directory(ABC):
    """Finds nodes, and takes note of what they say of each other and of how they do."""

    #: Whether there may be a better place to go to when a node says that it is the wrong one.
    follows: bool
    #: The node that has every key, if there is such a one.
    only_node: Node | None = None

    @abstractmethod
    async def ready(self) -> None:
        """Know some distribution of keys. Raises StorageUnavailableError when nobody tells it."""

    @abstractmethod
    def nodes_of(self, names: Sequence[bytes]) -> Sequence[Node | None]:
        """Return the node that has each key, None where nobody has."""

    @abstractmethod
    def follow(self, error: ReplyError) -> Detour | None:
        """Take in a redirection; say where to go now, None for wherever `nodes_of` says."""

    @abstractmethod
    def admit(self, node: Node) -> Ticket:
        """Say whether a node should be asked at all. A ticket that passed goes back to `judge`."""

    @abstractmethod
    def judge(self, node: Node, ticket: Ticket, *, is_well: bool | None) -> None:
        """Take note of how a node did; None if that did not come out."""

    @abstractmethod
    def any_well(self) -> bool:
        """Say whether a node may be well."""

    @abstractmethod
    async def look_again(self, node: Node) -> None:
        """Ask anew how keys are distributed, because `node` failed. Takes little time and never raises."""

    @abstractmethod
    def addresses(self) -> Sequence[Address]:
        """Return where all primaries are. Blocking, for a thread. Raises StorageUnavailableError."""

    @abstractmethod
    def nodes(self) -> Iterable[Node]:
        """Return all nodes there are now."""

    async def aclose(self) -> None:
        """Close all nodes. Idempotent."""
        for node in self.nodes():
            node.close()


class OneServer(Directory):
    """Every key is on the same node, wherever that is at the moment."""

    def __init__(self, door: Door, locate: Callable[[], Address], num_readers: int, *, only_primary: bool) -> None:
        """Connect to nothing yet.

        Args:
            door: opens connections.
            locate: says where the server is; blocking, raises StorageUnavailableError.
            num_readers: how many connections read at once.
            only_primary: refuse a server that says it is a replica.
        """
        self.follows = only_primary
        self._locate = locate
        self._node = Node("redis", lambda: door.open(locate(), only_primary=only_primary), num_readers)
        self.only_node = self._node

    async def ready(self) -> None:
        pass

    def nodes_of(self, names: Sequence[bytes]) -> Sequence[Node | None]:
        return [self._node] * len(names)

    def follow(self, error: ReplyError) -> Detour | None:
        self._node.flush()  # a primary no more
        return None

    def admit(self, node: Node) -> Ticket:
        return Ticket(passed=True)  # the breaker before the storage is enough for one server

    def judge(self, node: Node, ticket: Ticket, *, is_well: bool | None) -> None:
        if is_well is False:
            node.flush()

    def any_well(self) -> bool:
        return False

    async def look_again(self, node: Node) -> None:
        pass  # it is looked for whenever a connection is made

    def addresses(self) -> Sequence[Address]:
        return [self._locate()]

    def nodes(self) -> Iterable[Node]:
        return (self._node,)
