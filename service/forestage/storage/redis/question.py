"""One server's share of a probe: pipelined EXISTS, all answers in one round trip."""

from collections.abc import Iterable, Sequence

from forestage.storage.redis.commands import ASKING, exists
from forestage.storage.redis.errand import Errand
from forestage.storage.redis.errors import LinkError, ReplyError
from forestage.storage.redis.link import Link
from forestage.storage.redis.node import Node

__all__ = ["Question"]

# More commands are sent only after these are answered, so that neither side's socket buffers fill up.
_BLOCK = 8192


class Question(Errand[int]):
    """Asks one node which names exist. `run` in a prober thread of that node, then look at `flags` and `todo`."""

    def __init__(self, node: Node, places: Iterable[int], names: Sequence[bytes], *, asking: bool = False) -> None:
        """Ask nothing yet.

        Args:
            node: whose names they are.
            places: which of `names` to ask for.
            names: keys in Redis.
            asking: the names are on their way to this node, which answers for them only behind an ASKING.
        """
        super().__init__(node, places)
        #: 1 for each name that exists, by the order of places; complete when `todo` is empty.
        self.flags = bytearray()
        self.places = list(self.todo)
        self._names = names
        self._asking = asking
        self._refusal: ReplyError | None = None

    def _use(self, link: Link) -> None:
        names, places, replies = self._names, self.places, link.replies
        for begin in range(0, len(places), _BLOCK):
            block = places[begin : begin + _BLOCK]
            if self._asking:
                link.send(b"".join([ASKING + exists(names[place]) for place in block]))
                for _ in block:
                    replies.read_ok()
                    replies.read_flags(self.flags, 1, self._note)
            else:
                link.send(b"".join([exists(names[place]) for place in block]))
                replies.read_flags(self.flags, len(block), self._note)
        if self._refusal is not None:
            raise LinkError(f"the server refuses to answer: {self._refusal}") from self._refusal
        self.todo.clear()

    def _note(self, place: int, error: ReplyError) -> None:
        if error.is_redirect:
            self.redirected.append((self.places[place], error))
        else:
            self._refusal = error
