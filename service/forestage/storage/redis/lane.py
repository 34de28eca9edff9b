"""One server's share of a batch: pipelined GETs through one connection, a bounded window of replies ahead.

Law: a value that was asked for on a link is received from it or the link is dropped; values leave `todo` only by ending
or by being sent elsewhere. The lane touches views and reports only while it holds a link.
"""

from collections import deque
from collections.abc import Iterable

from forestage.storage.base import ReadOutcome
from forestage.storage.envelope import verify
from forestage.storage.redis.batch import Batch, ValueRead
from forestage.storage.redis.errand import Errand
from forestage.storage.redis.errors import AbandonedError, LinkError, OversizeError, ReplyError
from forestage.storage.redis.link import Link
from forestage.storage.redis.node import Node
from forestage.storage.redis.reply_stream import Value

__all__ = ["Lane"]

_FAILURES = {Value.NIL: ReadOutcome.MISSING, Value.ODD: ReadOutcome.CORRUPT}


class Lane(Errand):
    """Reads values of one node in order. `run` in a reader thread of that node, then look at what is left."""

    def __init__(self, node: Node, batch: Batch, values: Iterable[ValueRead], window_bytes: int) -> None:
        """Ask nothing yet.

        Args:
            node: whose values they are.
            batch: hears of the end of each.
            values: in order.
            window_bytes: about so many bytes of replies may be due at once, but at least one reply.
        """
        super().__init__(node)
        self.todo = deque(values)
        #: Values that the server sent elsewhere, with what it said.
        self.redirected: list[tuple[ValueRead, ReplyError]] = []
        self._batch = batch
        self._window_bytes = window_bytes
        self._asked: deque[ValueRead] = deque()

    def _use(self, link: Link) -> None:
        link.on_pause = self._look
        try:
            self._converse(link)
        finally:
            self.todo.extendleft(reversed(self._asked))
            self._asked.clear()

    def _converse(self, link: Link) -> None:
        asked, todo = self._asked, self.todo
        half = self._window_bytes // 2
        refused: list[ValueRead] = []
        refusal: ReplyError | None = None
        due_bytes = 0
        while True:
            if todo and refusal is None and (not asked or due_bytes <= half):
                due_bytes += self._ask(link, self._window_bytes - due_bytes)
            if not asked:
                break
            value = asked[0]
            try:
                outcome = self._receive(link, value, len(asked) - 1)
            except OversizeError:
                asked.popleft()
                self._batch.end(value, ReadOutcome.CORRUPT)
                raise
            except ReplyError as error:
                if error.code == "WRONGTYPE":
                    outcome = ReadOutcome.CORRUPT
                elif error.is_redirect:
                    self.redirected.append((value, error))
                    outcome = None
                else:
                    refused.append(value)
                    refusal = error
                    outcome = None
            asked.popleft()
            due_bytes -= len(value.view)
            if outcome is not None:
                self._batch.end(value, outcome)
        if refusal is not None:
            todo.extendleft(reversed(refused))
            raise LinkError(f"the server refuses to read: {refusal}") from refusal

    def _ask(self, link: Link, room: int) -> int:
        """Send GETs for the next values, `room` bytes of replies but at least one; return how many bytes they bring."""
        commands = []
        taken = 0
        while self.todo and (taken < room or not self._asked):
            value = self.todo.popleft()
            if self._batch.is_lost(value):
                self._batch.end(value, ReadOutcome.STOPPED)
                continue
            self._asked.append(value)
            value.page.progress += 1
            name = value.name
            commands.append(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
            taken += len(value.view)
        if commands:
            link.send(b"".join(commands))
        return taken

    def _receive(self, link: Link, value: ValueRead, due: int) -> ReadOutcome | None:
        shard, page, view = value.shard, value.page, value.view
        got = link.replies.read_value(view, shard.value_header, due, page)
        if got is not Value.WHOLE:
            return _FAILURES[got]
        if verify(link.replies.trailer, view, page.key, shard.seed):
            return ReadOutcome.LOADED
        return ReadOutcome.CORRUPT

    def _look(self) -> None:
        """Give up a connection on which nothing comes and from which nobody wants anything any more."""
        if all(self._batch.is_lost(value) for value in self._asked):
            raise AbandonedError("nobody wants the replies that are due")
