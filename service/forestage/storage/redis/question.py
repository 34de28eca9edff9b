"""One server's share of a probe: pipelined EXISTS, all answers in one round trip."""

from collections.abc import Sequence

from forestage.storage.redis.errand import Errand
from forestage.storage.redis.errors import ReplyError
from forestage.storage.redis.link import Link
from forestage.storage.redis.node import Node

__all__ = ["Question"]

# More commands are sent only after these are answered, so that neither side's socket buffers fill up.
_BLOCK = 8192


class Question(Errand):
    """Asks one node which of `names` exist. `run` in a prober thread of that node, then look at `flags`."""

    def __init__(self, node: Node, names: Sequence[bytes]) -> None:
        super().__init__(node)
        self.names = names
        #: 1 for each name that exists; shorter than `names` when the node failed.
        self.flags = bytearray()
        #: Names, by their place in `names`, that got an error instead of an answer.
        self.errors: list[tuple[int, ReplyError]] = []

    def _use(self, link: Link) -> None:
        for begin in range(0, len(self.names), _BLOCK):
            block = self.names[begin : begin + _BLOCK]
            link.send(b"".join([b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(name), name) for name in block]))
            link.replies.read_flags(self.flags, len(block), self._note)

    def _note(self, place: int, error: ReplyError) -> None:
        self.errors.append((place, error))
