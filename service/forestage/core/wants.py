"""Pages that are known to be asked for: by jobs that wait to be admitted, and by prefixes that a router expects.

Law: a page is marked as wanted exactly if it is among the `taken` first pages of a want, and at most `limit` are. A
want that is not taken whole either waits for its next page to become resident, or stands in line for room.

A prefix is marked from its first page on and no further than it is resident, since a page is worth nothing without
those before it, and a page that is not there needs no protection: it would only take the room of one that is. Who came
first is served first. What is marked beyond a part of the pool would protect nothing: all of it would go in turn, the
near behind the far.
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import Protocol

__all__ = ["Marks", "Want", "Wants"]


class Marks(Protocol):
    """Who evicts marked pages last."""

    def find(self, key: bytes) -> int:
        """Return the slot of a page, -1 if it is not resident."""

    def set_wanted(self, keys: Iterable[bytes], wanted: bool) -> None:
        """Mark pages, or take the mark away; deeper pages come first."""


class Want:
    """A prefix that will be asked for; `taken` of its pages are marked for it."""

    __slots__ = ("alive", "keys", "number", "taken")

    def __init__(self, number: int, keys: Sequence[bytes]) -> None:
        self.number = number
        self.keys = keys
        self.taken = 0
        self.alive = True


class Wants:
    """Wants in the order in which they came. Adding and removing one is O(its pages) and those that move up.

    The first of `marks` says what is resident; pages are marked in all of them.
    """

    def __init__(self, marks: Sequence[Marks], limit: int) -> None:
        self._marks = marks
        self._limit = limit
        self._counts: dict[bytes, int] = {}
        self._wants: set[Want] = set()
        self._in_line: list[tuple[int, Want]] = []  # a heap; some may have left
        self._awaiting: dict[bytes, list[Want]] = {}  # by the page that is not resident; some may have left
        self._begun = 0

    def __len__(self) -> int:
        return len(self._wants)

    @property
    def marked(self) -> int:
        """Pages that are marked now."""
        return len(self._counts)

    @property
    def room(self) -> int:
        """Pages that could be marked beside those that are."""
        return self._limit - len(self._counts)

    def add(self, keys: Sequence[bytes]) -> Want:
        """Evict the resident pages of a prefix last until `remove`, as far as there is room for marks."""
        self._begun += 1
        want = Want(self._begun, keys)
        self._wants.add(want)
        self._line_up([want])
        return want

    def remove(self, want: Want) -> None:
        """Nobody waits for this prefix any more. Idempotent."""
        if not want.alive:
            return
        want.alive = False
        self._wants.remove(want)
        if want.taken < len(want.keys):
            awaiting = self._awaiting.get(want.keys[want.taken], [])
            if want in awaiting:
                awaiting.remove(want)
                if not awaiting:
                    del self._awaiting[want.keys[want.taken]]
        counts, left = self._counts, []
        for key in reversed(want.keys[: want.taken]):
            count = counts[key] - 1
            if count:
                counts[key] = count
            else:
                del counts[key]
                left.append(key)
        if left:
            self._tell(left, wanted=False)
            self._line_up([])
        if len(self._in_line) > 2 * len(self._wants) + 16:
            self._in_line = [entry for entry in self._in_line if entry[1].alive]
            heapq.heapify(self._in_line)

    def arrived(self, key: bytes) -> None:
        """A page has become resident: go on with the prefixes that were marked up to there."""
        awaiting = self._awaiting.pop(key, None)
        if awaiting is not None:
            self._line_up(awaiting)

    def _line_up(self, wants: Iterable[Want]) -> None:
        """Put wants in line, and serve the line as far as there is room."""
        for want in wants:
            heapq.heappush(self._in_line, (want.number, want))
        while self._in_line:
            want = self._in_line[0][1]
            if want.alive and not self._serve(want):
                return
            heapq.heappop(self._in_line)

    def _serve(self, want: Want) -> bool:
        """Mark a want's pages up to one that is not resident; say whether there was room for all of them."""
        counts, came, find = self._counts, [], self._marks[0].find
        room = True
        for key in want.keys[want.taken :]:
            if key not in counts:
                if find(key) < 0:
                    self._awaiting.setdefault(key, []).append(want)
                    break
                room = len(counts) < self._limit
                if not room:
                    break
                came.append(key)
            counts[key] = counts.get(key, 0) + 1
            want.taken += 1
        if came:
            self._tell(came[::-1], wanted=True)
        return room

    def _tell(self, keys: Sequence[bytes], *, wanted: bool) -> None:
        for marks in self._marks:
            marks.set_wanted(keys, wanted)

    def check_integrity(self) -> None:
        """Recount the marks; raise with the numbers if the law is broken."""
        counted: dict[bytes, int] = {}
        for want in self._wants:
            for key in want.keys[: want.taken]:
                counted[key] = counted.get(key, 0) + 1
        if counted != self._counts or len(counted) > self._limit:
            raise RuntimeError(f"{len(self._counts)} pages are marked, recounted {len(counted)} of {self._limit}")
        awaiting = [(key, want) for key, wants in self._awaiting.items() for want in wants]
        if any(not want.alive or want.keys[want.taken] != key for key, want in awaiting):
            raise RuntimeError("a want waits for a page that is not its next one")
        in_line = [want for _, want in self._in_line if want.alive]
        short = sorted(want.number for want in self._wants if want.taken < len(want.keys))
        if sorted(want.number for want in [*in_line, *(want for _, want in awaiting)]) != short:
            raise RuntimeError(f"wants {short} are short, {len(in_line)} in line, {len(awaiting)} wait for a page")
        if in_line and len(self._counts) < self._limit:
            raise RuntimeError(f"{len(in_line)} wants are in line, and there is room")
