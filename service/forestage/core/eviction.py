"""The orders in which idle pages are evicted, one for each account, as lines of slots that are linked to each other.

Law: an idle page stands in exactly one line of its account, that of its rank, or the last one while somebody is known
to want it. Lines are evicted one after another, in each the page that was idle longest first:

    passing   new pages, while the pool is too small to keep all new ones (see core.reuse)
    new       pages that were kept, and those that fell out of the next line
    again     pages that were wanted again while they were idle, or not long after they left; a third of the account's
              slots at most
    wanted    pages that a queued job or a hint will ask for (see core.wants)

A page's rank is at least that of any page that was released before it in the same call, deeper pages come first, and
nobody holds a page without those before it: so an ancestor goes after its descendants.

Line `number` is a ring through the place `capacity + number`: `younger[place]` is the page that goes first,
`older[place]` the one that goes last. 16 bytes a slot, whatever stands where.
"""

from collections.abc import Iterator
from itertools import pairwise

__all__ = ["AGAIN", "LINES", "NEW", "PASSING", "SEEN", "UNDECIDED", "WANTED", "EvictionOrders"]

LINES = 4
PASSING, NEW, AGAIN, WANTED = range(LINES)
#: Of pages that were not released yet: not known from before, and known.
UNDECIDED, SEEN = 3, 4

_AGAIN_SHARE = 3


class EvictionOrders:
    """The orders of some accounts; `4 * account + rank` is the line of a rank. Everything is O(1) a page."""

    __slots__ = ("_capacity", "lengths", "older", "rank", "younger")

    def __init__(self, capacity: int, accounts: int) -> None:
        places = capacity + LINES * accounts
        self._capacity = capacity
        self.older = list(range(places))  # lists, not arrays: what is read is not made anew
        self.younger = self.older.copy()
        self.lengths = [0] * (LINES * accounts)
        self.rank = bytearray(capacity)

    def count(self, account: int) -> int:
        """Count the idle pages of an account."""
        return sum(self.lengths[LINES * account : LINES * (account + 1)])

    def slots(self, account: int) -> Iterator[int]:
        """Yield the slots of an account in the order in which they would go now."""
        for line in range(LINES * account, LINES * (account + 1)):
            yield from self.line(line)

    def line(self, line: int) -> Iterator[int]:
        """Yield the slots of a line, the first to go first."""
        end = self._capacity + line
        slot = self.younger[end]
        while slot != end:
            yield slot
            slot = self.younger[slot]

    def add(self, slot: int, line: int) -> None:
        """Put a page at the young end of a line."""
        end = self._capacity + line
        last = self.older[end]
        self.younger[last], self.older[slot] = slot, last
        self.younger[slot], self.older[end] = end, slot
        self.lengths[line] += 1

    def last(self, line: int) -> int:
        """Return the place behind which a page that is added to a line stands."""
        return self.older[self._capacity + line]

    def end_run(self, line: int, last: int, length: int) -> None:
        """Close a line to which the caller has linked `length` pages behind each other, up to `last`."""
        if length:
            end = self._capacity + line
            self.younger[last], self.older[end] = end, last
            self.lengths[line] += length

    def add_first(self, slot: int, line: int) -> None:
        """Put a page at the old end of a line."""
        end = self._capacity + line
        first = self.younger[end]
        self.older[first], self.younger[slot] = slot, first
        self.older[slot], self.younger[end] = end, slot
        self.lengths[line] += 1

    def remove(self, slot: int, line: int) -> None:
        """Take a page out of the line in which it stands."""
        before, behind = self.older[slot], self.younger[slot]
        self.younger[before], self.older[behind] = behind, before
        self.lengths[line] -= 1

    def pop(self, account: int) -> int:
        """Take out the page of an account that goes first; there must be one."""
        for line in range(LINES * account, LINES * (account + 1)):
            if self.lengths[line]:
                slot = self.younger[self._capacity + line]
                self.remove(slot, line)
                return slot
        raise RuntimeError(f"account {account} has no page that can be evicted")

    def trim(self, account: int, size: int) -> None:
        """Keep no more than a third of an account of `size` slots among the pages wanted again."""
        line = LINES * account + AGAIN
        count = self.lengths[line] - max(1, size // _AGAIN_SHARE)
        if count <= 0:
            return
        older, younger, rank = self.older, self.younger, self.rank
        source, target = self._capacity + line, self._capacity + LINES * account + NEW
        first = slot = younger[source]
        rank[slot] = NEW
        for _ in range(count - 1):
            slot = younger[slot]
            rank[slot] = NEW
        # They stay linked to each other, and move as one.
        rest, last = younger[slot], older[target]
        younger[source], older[rest] = rest, source
        younger[last], older[first] = first, last
        younger[slot], older[target] = target, slot
        self.lengths[line] -= count
        self.lengths[LINES * account + NEW] += count

    def check_integrity(self) -> None:
        """Walk all lines both ways; raise if links or lengths are wrong. O(idle pages)."""
        for line, length in enumerate(self.lengths):
            slots = list(self.line(line))
            places = [self._capacity + line, *slots, self._capacity + line]
            if len(slots) != length or any(self.older[b] != a for a, b in pairwise(places)):
                raise RuntimeError(f"line {line} has {slots}, {length} long, linked back otherwise")
