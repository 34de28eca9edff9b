"""Replies as they come from a connection, values received straight into the memory they are meant for.

Law: `_spill[_start:_end]` holds exactly the bytes that were received and not yet handed out. No length found in a reply
makes anything be allocated, and no call waits for a byte that the replies still due do not have for certain.
"""

from collections.abc import Callable, Sequence
from enum import Enum

from forestage.storage.base import PageRead
from forestage.storage.redis.errors import AbandonedError, DesyncError, OversizeError, ReplyError

__all__ = ["MAX_RUN", "Receive", "ReplyStream", "Value", "value_header"]

# Fill buffers in order and return how many bytes came: at least one. With `fully`, come back with less than asked
# only after a pause. Raises LinkError.
Receive = Callable[[Sequence[memoryview], bool], int]

CHUNK_BYTES = 8 << 20  # at most so much between two touches of `progress`
_SPILL_BYTES = 4096
_SCRATCH_BYTES = 64 << 10
_SHORTEST_REPLY = 5  # bytes: "$-1\r\n" and any error; those to EXISTS have 4
_MAX_AHEAD = 64  # bytes of later replies taken in the same call: enough for a head
_MAX_LINE = 64 << 10
_KEPT_OF_LINE = 256
MAX_RUN = 32  # values received in one call
# A value of the wrong length is read to its end up to here; beyond, a new connection is cheaper.
_MAX_SKIPPED = 4 << 20
_FLAG = 4  # bytes of the reply ":1\r\n"
_DIGITS = bytes.maketrans(b"01", b"\0\1")


class Value(Enum):
    """What a GET brought."""

    WHOLE = "whole"  # payload and trailer of the length that was expected
    NIL = "nil"
    ODD = "odd"  # another length; it was passed over


def value_header(payload_bytes: int, trailer_bytes: int) -> bytes:
    """Return the head of the reply that carries a payload of this size with its trailer."""
    return b"$%d\r\n" % (payload_bytes + trailer_bytes)


class ReplyStream:
    """The receiving side of one connection. Used by one thread at a time."""

    def __init__(self, receive: Receive, trailer_bytes: int, *, gathers: bool = True) -> None:
        """Begin with nothing received; `gathers` says that `receive` fills more than the first buffer.

        `trailer_bytes`, which may be 0, is what values have behind their payload.
        """
        self._receive = receive
        self._gathers = gathers
        self._trailer = trailer_bytes
        self._tail = trailer_bytes + 2  # the end of a reply behind the payload
        self._gap = self._tail + _MAX_AHEAD  # what lies between two payloads at most: that, and the head of the next
        self._gaps = memoryview(bytearray(MAX_RUN * self._gap))
        self._spill = bytearray(_SPILL_BYTES)
        self._room = memoryview(self._spill)
        self._start = 0
        self._end = 0
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))

    @property
    def is_empty(self) -> bool:
        """True when no byte was received that is not handed out."""
        return self._start == self._end

    def read_value(self, view: memoryview, header: bytes, due: int, page: PageRead) -> Value:
        """Receive the reply to a GET: the payload into `view`; after WHOLE, `take_trailer` is to follow.

        `header` is the `value_header` of the view, `due` how many replies are still to come after this one.
        Raises ReplyError for an error reply, OversizeError for a value that is not worth reading to its end,
        AbandonedError when the page is stopped and much of it is still to come.
        """
        if not self._spill.startswith(header, self._start, self._end):
            line = self._line()
            if line != header[:-2]:
                return self._other_value(line)
            start = self._start
        else:
            start = self._start + len(header)
        size = len(view)
        done = self._end - start
        if done >= size:
            view[:] = self._room[start : start + size]
            self._start = start + size
            return Value.WHOLE
        view[:done] = self._room[start : self._end]
        behind = self._tail + min(_MAX_AHEAD, _SHORTEST_REPLY * due)
        self._start = self._end = 0
        while done < size:
            if size - done <= CHUNK_BYTES:
                buffers = [view[done:], self._room[:behind]]
            else:
                buffers = [view[done : done + CHUNK_BYTES]]
            done += self._receive(buffers, True)
            page.progress += 1
            if page.stopped and done + CHUNK_BYTES < size:
                raise AbandonedError("stopped in the middle of a large value")
        self._end = done - size
        return Value.WHOLE

    def read_run(self, values: Sequence[tuple[memoryview, bytes, PageRead]], due: int) -> list[bytes]:
        """Receive the replies to several GETs in one call; return the trailers of those that came whole, in order.

        `values` are view, `value_header` and page of each, at most `MAX_RUN`; `due` replies are still to come after
        them. It ends before the first reply that is something else, which is then to be read by `read_value`, as is
        the first of `values` when nothing is returned. Views of values that did not come whole may hold anything.
        """
        view, header, _ = values[0]
        while self._gathers and header.startswith(self._spill[self._start : self._end]) and not self._has(len(header)):
            self._fill()
        begin = self._start + len(header)
        done = self._end - begin
        if not self._gathers or not self._spill.startswith(header, self._start, self._end) or done >= len(view):
            return []
        view[:done] = self._room[begin : self._end]
        self._start = self._end = 0
        buffers = [view[done:]]
        for at, (view, header, _) in zip(range(0, MAX_RUN * self._gap, self._gap), values[1:], strict=False):
            buffers += (self._gaps[at : at + self._tail + len(header)], view)
        at = self._gap * (len(values) - 1)
        buffers.append(self._gaps[at : at + self._tail + min(_MAX_AHEAD, _SHORTEST_REPLY * due)])
        total, got = sum(map(len, buffers)), 0
        trailers: list[bytes] = []
        behind, is_odd = 0, False
        # After a pause whole values are handed out: the next one may never come.
        while got < total and not trailers and not is_odd:
            got += self._receive(_beyond(buffers, got) if got else buffers, True)
            for _, _, page in values:
                page.progress += 1
            trailers, behind, is_odd = self._ends_of(values, len(buffers[0]), got)
        rest = b"".join(_beyond(buffers, behind, got))
        if len(rest) > len(self._spill):
            self._spill = bytearray(len(rest))
            self._room = memoryview(self._spill)
        self._spill[: len(rest)] = rest
        self._end = len(rest)
        return trailers

    def _ends_of(
        self, values: Sequence[tuple[memoryview, bytes, PageRead]], at: int, got: int
    ) -> tuple[list[bytes], int, bool]:
        """Look at the gaps behind values of which `got` bytes came, the first gap after `at` bytes.

        Returns the trailers of the values that are whole, how many bytes those values are, and whether what follows
        them is something else than the next value.
        """
        trailers: list[bytes] = []
        behind = 0
        for place in range(len(values)):
            here = min(got - at, self._gap)
            if here < self._tail:
                return trailers, behind, False
            gap = bytes(self._gaps[place * self._gap : place * self._gap + here])
            if gap[self._trailer : self._tail] != b"\r\n":
                if trailers:
                    return trailers, behind, True
                raise DesyncError("a value does not end where its head said")
            trailers.append(gap[: self._trailer])
            behind = at + self._tail
            if place + 1 < len(values):
                view, header, _ = values[place + 1]
                head = gap[self._tail : self._tail + len(header)]
                if not header.startswith(head):
                    return trailers, behind, True
                at = behind + len(header) + len(view)
        return trailers, behind, False

    def take_trailer(self, expected: bytes) -> bool:
        """Receive the rest of a value; say whether it is the trailer that it ought to have. Raises DesyncError."""
        while self._end - self._start < self._tail:
            self._fill()
        start = self._start
        self._start = end = start + self._tail
        if self._spill[end - 2 : end] != b"\r\n":
            raise DesyncError("a value does not end where its head said")
        return self._spill.startswith(expected, start)

    def read_flags(self, flags: bytearray, count: int, on_error: Callable[[int, ReplyError], None]) -> None:
        """Receive the replies to `count` commands that are answered 0 or 1, and append them to `flags`.

        An error reply appends 0 and calls `on_error` with its place in `flags`.
        """
        while count:
            if self.is_empty:
                self._start = 0
                self._end = self._receive([self._room[: _FLAG * count]], True)
            num = min((self._end - self._start) // _FLAG, count)
            block = self._spill[self._start : self._start + _FLAG * num]
            digits = block[1::_FLAG]
            if num and block[0::_FLAG].strip(b":") + block[2::_FLAG].strip(b"\r") + digits.strip(b"01") == b"":
                flags += digits.translate(_DIGITS)
                self._start += _FLAG * num
            else:
                num = 1
                try:
                    flags.append(min(self.read_number(), 1))
                except ReplyError as error:
                    flags.append(0)
                    on_error(len(flags) - 1, error)
            count -= num

    def read_number(self) -> int:
        """Receive an integer reply."""
        line = self._line()
        if line[:1] == b"-":
            raise ReplyError(line[1:])
        if line[:1] != b":" or not line[1:].isdigit():
            raise DesyncError("a reply is no number")
        return int(line[1:])

    def read_ok(self) -> None:
        """Receive the reply to a command that answers with a status."""
        line = self._line()
        if line[:1] == b"-":
            raise ReplyError(line[1:])
        if line[:1] != b"+":
            raise DesyncError("a reply is no status")

    def _other_value(self, line: bytes) -> Value:
        # 1. nothing there; 2. another length; 3. an error; 4. this is no Redis, or out of step with us.
        if line == b"$-1":
            return Value.NIL
        if line[:1] == b"$" and line[1:].isdigit():
            length = int(line[1:])
            if length > _MAX_SKIPPED:
                raise OversizeError("a value is much longer than one of ours")
            self._skip(length)
            return Value.ODD
        if line[:1] == b"-":
            raise ReplyError(line[1:])
        raise DesyncError("a reply is no value")

    def _skip(self, length: int) -> None:
        spilled = min(self._end - self._start, length)
        self._start += spilled
        left = length - spilled
        while left:
            left -= self._receive([self._scratch[: min(left, _SCRATCH_BYTES)]], True)
        self._require(2)
        self._start += 2
        if self._spill[self._start - 2 : self._start] != b"\r\n":
            raise DesyncError("a value does not end where its head said")

    def _line(self) -> bytes:
        at = self._spill.find(b"\r\n", self._start, self._end)
        if at < 0:
            return self._slow_line()
        line = bytes(self._room[self._start : at])
        self._start = at + 2
        return line

    def _slow_line(self) -> bytes:
        """Receive until the line is there; of one that does not fit into the spill only the beginning is returned."""
        kept = b""
        length = 0
        while (at := self._spill.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start == len(self._spill):
                length += len(self._spill) - 1
                if length > _MAX_LINE:
                    raise DesyncError("a line does not end")
                kept = kept or bytes(self._room[self._start : self._start + _KEPT_OF_LINE])
                self._start = self._end - 1  # it may be the first half of the line's end
            self._fill()
        line = kept or bytes(self._room[self._start : at])
        self._start = at + 2
        return line

    def _has(self, count: int) -> bool:
        return self._end - self._start >= count

    def _require(self, count: int) -> None:
        while not self._has(count):
            self._fill()

    def _fill(self) -> None:
        if self._start:
            rest = bytes(self._room[self._start : self._end])
            self._spill[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        self._end += self._receive([self._room[self._end :]], False)


def _beyond(buffers: Sequence[memoryview], start: int, end: int | None = None) -> list[memoryview]:
    """Return what `buffers`, taken as one run of bytes, have from `start` on (up to `end`)."""
    parts = []
    for buffer in buffers:
        size = len(buffer)
        part = buffer[max(0, start) : size if end is None else max(0, end)]
        if len(part):
            parts.append(part)
        start -= size
        if end is not None:
            end -= size
    return parts
