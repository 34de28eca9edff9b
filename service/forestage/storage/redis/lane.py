"""One server's share of a batch: pipelined GETs through one connection, a bounded window of replies ahead.

Law: a value that was asked for on a link is received from it or the link is dropped; values leave `todo` only by ending
or by being sent elsewhere. The lane touches views and reports only while it holds a link.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice

from forestage.storage.base import ReadOutcome
from forestage.storage.redis.batch import Batch, ValueRead
from forestage.storage.redis.commands import ASKING, get
from forestage.storage.redis.errand import Errand
from forestage.storage.redis.errors import AbandonedError, LinkError, OversizeError, ReplyError
from forestage.storage.redis.link import Link
from forestage.storage.redis.node import Node
from forestage.storage.redis.reply_stream import MAX_RUN, Value

__all__ = ["Lane"]

_TICK_S = 0.05
_BESIDE_BYTES = 128  # what a reply has beside the payload, about
_RUN_BYTES = 512 << 10  # of payload received in one call: small pages would only wake the thread each
_MAX_ASKED = 1024  # commands due on a connection, so that they always fit into its buffers
_FAILURES = {Value.NIL: ReadOutcome.MISSING, Value.ODD: ReadOutcome.CORRUPT}


class Lane(Errand[ValueRead]):
    """Reads values of one node in order. `run` in a reader thread of that node, then look at what is left."""

    def __init__(
        self, node: Node, values: Iterable[ValueRead], batch: Batch, window_bytes: int, *, asking: bool = False
    ) -> None:
        """Ask nothing yet.

        Args:
            node: whose values they are.
            values: in order.
            batch: hears of the end of each.
            window_bytes: about so many bytes of replies may be due at once on its connection, but at least one reply;
                larger ones need leave from the node.
            asking: the values are on their way to this node, which answers for them only behind an ASKING.
        """
        super().__init__(node, values)
        self._batch = batch
        self._window_bytes = window_bytes
        self._asking = asking
        self._asked: deque[ValueRead] = deque()
        self._refused: list[ValueRead] = []

    def _use(self, link: Link) -> None:
        link.on_pause = self._look
        try:
            self._converse(link)
        finally:
            undone = [*self._refused, *self._asked]
            self._refused.clear()
            while self._asked:
                self._settle()
            self.todo.extendleft(reversed(undone))

    def _converse(self, link: Link) -> None:
        asked, half = self._asked, self._window_bytes // 2
        due_bytes = 0
        refusal: ReplyError | None = None
        while True:
            if self.todo and refusal is None and (not asked or due_bytes <= half):
                due_bytes += self._ask(link, self._window_bytes - due_bytes)
            if not asked:
                break
            run_bytes = self._receive_run(link)
            if run_bytes:
                due_bytes -= run_bytes
                continue
            value = asked[0]
            due_bytes -= len(value.view) + _BESIDE_BYTES
            try:
                outcome = self._receive(link, value, len(asked) - 1)
            except OversizeError:
                self._settle()
                self._batch.end(value, ReadOutcome.CORRUPT)
                raise
            except ReplyError as error:
                self._settle()
                # 1. not a string, so not ours; 2. to be asked elsewhere; 3. the server does not serve at all
                if error.code == "WRONGTYPE":
                    self._batch.end(value, ReadOutcome.CORRUPT)
                elif error.is_redirect:
                    self.redirected.append((value, error))
                else:
                    self._refused.append(value)
                    refusal = error
                continue
            self._settle()
            self._batch.end(value, outcome)
        if refusal is not None:
            raise LinkError(f"the server refuses to read: {refusal}") from refusal

    def _ask(self, link: Link, room: int) -> int:
        """Send GETs for the next values, `room` bytes of replies but at least one; return how many bytes they bring."""
        pieces = []
        taken = 0
        todo, asked, batch = self.todo, self._asked, self._batch
        while todo and (not asked or (taken < room and len(asked) < _MAX_ASKED)):
            value = todo[0]
            if batch.is_lost(value):
                todo.popleft()
                batch.end(value, ReadOutcome.STOPPED)
                continue
            size = len(value.view)
            if size > self._window_bytes and not self.node.allowance.take(size):
                if asked:
                    break
                self._wait_for_leave(link)
                continue
            todo.popleft()
            asked.append(value)
            value.page.progress += 1
            if self._asking:
                pieces.append(ASKING)
            pieces.append(get(value.redis_name()))
            taken += size + _BESIDE_BYTES
        if pieces:
            link.send(b"".join(pieces))
        return taken

    def _settle(self) -> None:
        """Take note that the oldest reply came, or will not come."""
        size = len(self._asked.popleft().view)
        if size > self._window_bytes:
            self.node.allowance.give_back(size)

    def _wait_for_leave(self, link: Link) -> None:
        """Wait a moment: the server has large replies to send on other connections."""
        self.node.allowance.wait(_TICK_S)
        if self.is_broken_off or not self.node.trusts(link):
            raise LinkError("given up while it waited for replies on other connections")

    def _receive(self, link: Link, value: ValueRead, due: int) -> ReadOutcome:
        replies, shard, page, view = link.replies, value.shard, value.page, value.view
        if self._asking:
            replies.read_ok()
        got = replies.read_value(view, shard.value_header, due, page)
        if got is not Value.WHOLE:
            return _FAILURES[got]
        # Now, while the page is in the cache.
        return ReadOutcome.LOADED if replies.take_trailer(shard.seal(view, page.key)) else ReadOutcome.CORRUPT

    def _receive_run(self, link: Link) -> int:
        """Receive as many of the next values in one call as makes sense; return how many bytes their replies were.

        0 when the next reply is to be received by itself.
        """
        asked = self._asked
        # An ASKING has a reply of its own.
        most = 1 if self._asking else min(len(asked), MAX_RUN, _RUN_BYTES // max(1, len(asked[0].view)))
        if most < 2:
            return 0
        values = list(islice(asked, most))
        parts = [(value.view, value.shard.value_header, value.page) for value in values]
        taken = 0
        for value, trailer in zip(values, link.replies.read_run(parts, len(asked) - most), strict=False):
            good = trailer == value.shard.seal(value.view, value.page.key)
            self._settle()
            self._batch.end(value, ReadOutcome.LOADED if good else ReadOutcome.CORRUPT)
            taken += len(value.view) + _BESIDE_BYTES
        return taken

    def _look(self) -> None:
        """Give up a connection on which nothing comes and from which nobody wants anything any more."""
        if all(self._batch.is_lost(value) for value in self._asked):
            raise AbandonedError("nobody wants the replies that are due")
