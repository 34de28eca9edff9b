"""Commands that change values, pipelined; a value is sent from where it lies."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

from forestage.storage.base import Buffer
from forestage.storage.redis.commands import ASKING
from forestage.storage.redis.errand import Errand
from forestage.storage.redis.errors import ReplyError
from forestage.storage.redis.link import Link
from forestage.storage.redis.node import Node

__all__ = ["Change", "Order"]


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """One command for one key: how to make its bytes, in a thread and in pieces; whether a number answers it."""

    name: bytes
    pieces: Callable[[], tuple[Buffer, ...]]
    is_counted: bool

    def redis_name(self) -> bytes:
        """Return the key that it changes."""
        return self.name


class Order(Errand[Change]):
    """Has one node make changes. `run` in a writer thread of that node, then look at `count` and `refused`."""

    def __init__(self, node: Node, changes: Iterable[Change], *, asking: bool = False) -> None:
        """Send nothing yet.

        Args:
            node: whose keys they are.
            changes: in any order.
            asking: the keys are on their way to this node, which takes them only behind an ASKING.
        """
        super().__init__(node, changes)
        #: What the counted ones added up to.
        self.count = 0
        #: What the server would not do.
        self.refused: list[ReplyError] = []
        self._asking = asking

    @classmethod
    def at(cls, node: Node, changes: Iterable[Change], asking: bool) -> Self:
        """Make one, as a `Kind` wants it."""
        return cls(node, changes, asking=asking)

    def _use(self, link: Link) -> None:
        for change in self.todo:
            if self._asking:
                link.send(ASKING)
            link.send(*change.pieces())
        while self.todo:
            try:
                self._take_answer(link, self.todo[0])
            except ReplyError as error:
                if error.is_redirect:
                    self.redirected.append((self.todo[0], error))
                else:
                    self.refused.append(error)
            self.todo.popleft()

    def _take_answer(self, link: Link, change: Change) -> None:
        if self._asking:
            link.replies.read_ok()
        if change.is_counted:
            self.count += link.replies.read_number()
        else:
            link.replies.read_ok()
