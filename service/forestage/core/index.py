"""The resident pages of one component: key to slot, who holds them, which one goes first.

Law: `find(key)` and `key_of(slot)` are inverse; a slot is evictable exactly if it is resident and nobody holds it.

Order of eviction: by what a page has shown to be worth (core.eviction), then least recently used chain first, and
within a chain the deepest page first. Holding takes a page out of the order; releasing puts it back. A prefix is
released from its deepest page to its first, so an ancestor always goes after its descendants and no eviction leaves a
page that nothing leads to.
"""

from collections.abc import Iterable, Mapping, Sequence

from forestage.core.eviction import AGAIN, LINES, NEW, PASSING, SEEN, UNDECIDED, WANTED, EvictionOrders
from forestage.core.reuse import ReuseDistances, SeenPages

__all__ = ["PageIndex"]


class PageIndex:
    """Resident pages with hold counts. Single operations are O(1), whatever is resident or held."""

    def __init__(self, capacity: int, accounts: int = 1) -> None:
        self._capacity = capacity
        self._slot_of: dict[bytes, int] = {}
        self._key_of: list[bytes | None] = [None] * capacity
        self._holds = [0] * capacity
        self._fresh = bytearray(capacity)  # read from L3 and not used since
        self._orders = EvictionOrders(capacity, accounts)
        self._rank = self._orders.rank
        self._wanted = bytearray(capacity)
        self._wanted_keys: set[bytes] = set()
        self._account = bytearray(capacity)
        self._sampled = bytearray(capacity)  # its way back is looked at
        seen = SeenPages(capacity)
        self._reuse = [ReuseDistances(seen, account) for account in range(accounts)]
        self.evicted = 0
        self.used = 0
        self.unused = 0

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def evictable(self) -> int:
        """Resident pages that nobody holds."""
        return sum(self._orders.lengths)

    @property
    def held(self) -> int:
        """Resident pages that a job or a lease holds."""
        return len(self._slot_of) - self.evictable

    def find(self, key: bytes) -> int:
        """Return the slot of a resident page, -1 if it is not resident."""
        return self._slot_of.get(key, -1)

    def key_of(self, slot: int) -> bytes | None:
        return self._key_of[slot]

    def resident_pages(self) -> dict[int, bytes]:
        """Return the keys of all resident pages by slot. O(resident)."""
        return {slot: key for key, slot in self._slot_of.items()}

    def is_held(self, slot: int) -> bool:
        return self._holds[slot] > 0

    def count_held(self, slots: range) -> int:
        """Count those of some slots that somebody holds."""
        holds = self._holds[slots.start : slots.stop : slots.step]
        return len(holds) - holds.count(0)

    def held_once(self, slot: int) -> bool:
        """Say whether exactly one holder keeps this slot."""
        return self._holds[slot] == 1

    def look_up(self, keys: Iterable[bytes]) -> list[int | None]:
        """Return the slot of each page, None where it is not resident."""
        return list(map(self._slot_of.get, keys))

    def slots_of(self, keys: Iterable[bytes]) -> list[int]:
        """Return the slots of resident pages. Raises KeyError when one is not resident."""
        return list(map(self._slot_of.__getitem__, keys))

    def mark_resident(self, slots: Sequence[int | None], first: int, status: bytearray, idle: int, held: int) -> None:
        """Write `idle` or `held` into `status` for each page from `first` on that has a slot."""
        holds, here = self._holds, slots[first:]
        run = here.index(None) if None in here else len(here)
        is_held = bytes(map(bool, map(holds.__getitem__, here[:run])))  # type: ignore[arg-type]  # before the first None
        status[first : first + run] = is_held.translate(bytes([idle, held]).ljust(256))
        for page, slot in enumerate(here[run:], first + run):
            if slot is not None:
                status[page] = held if holds[slot] else idle

    def insert(self, slot: int, key: bytes, holds: int, *, fresh: bool = True) -> None:
        """Make a page resident, held `holds` times; `fresh` says that it was just read from L3."""
        if key in self._slot_of or self._key_of[slot] is not None:
            raise RuntimeError(f"slot {slot} or its key is resident already")
        self._slot_of[key] = slot
        self._key_of[slot] = key
        self._holds[slot] = holds
        self._fresh[slot] = fresh
        self._wanted[slot] = key in self._wanted_keys
        if holds:
            account = self._account[slot]
            known = self._reuse[account].bring(key, self._size_of(account))
            self._sampled[slot] = known is not None
            self._rank[slot] = SEEN if known else UNDECIDED
        else:
            self._rank[slot] = NEW
            self._orders.add(slot, self._line_of(slot))

    def _line_of(self, slot: int) -> int:
        """Return the line in which an idle page stands, or belongs."""
        return LINES * self._account[slot] + (WANTED if self._wanted[slot] else self._rank[slot])

    def hold(self, slots: Iterable[int], tenant: int = 0, *, again: bool = False) -> None:
        """Keep resident pages from eviction until they are released as often as held.

        `again` says that somebody wants them anew: those that nobody holds rank higher from now on.
        """
        holds, ranks, wanted = self._holds, self._rank, self._wanted
        older, younger, lengths = self._orders.older, self._orders.younger, self._orders.lengths
        for slot in slots:
            if not holds[slot]:
                rank = ranks[slot]
                # As EvictionOrders.remove does, for one account and without a call for each page.
                before, behind = older[slot], younger[slot]
                younger[before], older[behind] = behind, before
                lengths[WANTED if wanted[slot] else rank] -= 1
                if rank != AGAIN:
                    if again:
                        ranks[slot] = AGAIN
                        if self._sampled[slot]:
                            self._note_return(slot)
                    elif rank == PASSING:
                        ranks[slot] = NEW  # it does not pass any more
            holds[slot] += 1

    def _note_return(self, slot: int) -> None:
        """A page whose way back is looked at is wanted again, from the pool."""
        self._sampled[slot] = 0
        key, account = self._key_of[slot], self._account[slot]
        assert key is not None
        self._reuse[account].want_again(key, self._size_of(account))

    def release(self, slots: Iterable[int]) -> None:
        """Undo one hold each. Pass deeper pages first: the last one released is the last to be evicted."""
        slots = tuple(slots)
        holds, ranks, orders = self._holds, self._rank, self._orders
        older, younger = orders.older, orders.younger
        plain = len(self._reuse) == 1 and not self._wanted_keys
        decided: int | None = None
        rank = PASSING
        line = last = -1
        length = 0
        lines = set()
        for slot in slots:
            count = holds[slot]
            if count <= 0:
                raise RuntimeError(f"slot {slot} released without a hold")
            holds[slot] = count - 1
            own = ranks[slot]
            if own != rank:
                if own >= UNDECIDED:
                    if decided is None:
                        decided = self._decide(slots)
                    own = decided
                rank = max(own, rank)
                ranks[slot] = rank
            if count == 1:
                its_line = rank if plain else self._line_of(slot)
                if its_line != line:
                    orders.end_run(line, last, length)
                    line, length = its_line, 0
                    last = orders.last(line)
                    lines.add(line)
                # They are linked one by one, and the last one to the end of the line in `end_run`.
                younger[last] = slot
                older[slot] = last
                last = slot
                length += 1
        orders.end_run(line, last, length)
        for account in {line // LINES for line in lines}:
            orders.trim(account, self._size_of(account))

    def _decide(self, slots: Sequence[int]) -> int:
        """Rank new pages that are released together, all alike: a page that comes back is worth more than a new one."""
        ranks = [self._rank[slot] for slot in slots]
        pages = ranks.count(UNDECIDED) + ranks.count(SEEN)
        known, reuse = SEEN in ranks, self._reuse[self._account[slots[0]]]
        if not reuse.keeps(pages, known):
            return PASSING
        return AGAIN if known and not reuse.selective else NEW

    def _size_of(self, account: int) -> int:
        """Return how many slots the pages of an account compete for."""
        return self._capacity

    def set_wanted(self, keys: Iterable[bytes], wanted: bool) -> None:
        """Evict pages last from now on, resident ones and such as come, or no more. Pass deeper pages first."""
        for key in keys:
            (self._wanted_keys.add if wanted else self._wanted_keys.discard)(key)
            slot = self._slot_of.get(key, -1)
            if slot < 0:
                continue
            line, self._wanted[slot] = self._line_of(slot), wanted
            if not self._holds[slot]:
                self._orders.remove(slot, line)
                self._orders.add(slot, self._line_of(slot))

    def mark_used(self, slots: Iterable[int]) -> None:
        """Count pages that a prefetch brought and somebody wanted again or consumed, once each."""
        fresh = self._fresh
        for slot in slots:
            if fresh[slot]:
                fresh[slot] = 0
                self.used += 1

    def demote(self, slots: Iterable[int]) -> None:
        """Let resident pages that nobody holds go first from now on. Pass deeper pages last: they go before others."""
        for slot in slots:
            self._orders.remove(slot, self._line_of(slot))
            self._rank[slot] = PASSING
            self._orders.add_first(slot, self._line_of(slot))

    def evict(self, count: int) -> list[int]:
        """Drop the pages that go first and return their slots; there must be as many that can go."""
        evicted = []
        for _ in range(count):
            slot = self._orders.pop(0)
            self._forget(slot)
            evicted.append(slot)
        self.evicted += count
        return evicted

    def drop(self, slot: int) -> None:
        """Drop a resident page that nobody holds."""
        self._orders.remove(slot, self._line_of(slot))
        self._forget(slot)

    def _forget(self, slot: int) -> None:
        key = self._key_of[slot]
        assert key is not None
        del self._slot_of[key]
        self._key_of[slot] = None
        self.unused += self._fresh[slot]
        self._fresh[slot] = self._wanted[slot] = self._rank[slot] = self._sampled[slot] = 0

    def check_holds(self, expected: Mapping[int, int]) -> None:
        """Compare hold counts with those of the known holders, by slot; raise if they differ."""
        counted = {slot: count for slot, count in enumerate(self._holds) if count}
        if counted != dict(expected):
            raise RuntimeError(f"holds by slot {counted}, holders say {dict(expected)}")

    def check_integrity(self) -> None:
        """Compare all tables with each other; raise with the numbers if the law is broken. O(capacity)."""
        for key, slot in self._slot_of.items():
            if self._key_of[slot] != key:
                raise RuntimeError(f"slot {slot} does not name the key that names it")
        named = sum(key is not None for key in self._key_of)
        if named != len(self._slot_of):
            raise RuntimeError(f"{named} slots name a key, {len(self._slot_of)} keys name a slot")
        self._orders.check_integrity()
        line_of = {slot: line for line in range(len(self._orders.lengths)) for slot in self._orders.line(line)}
        num_idle = 0
        for slot, named_key in enumerate(self._key_of):
            idle = named_key is not None and self._holds[slot] == 0
            if named_key is not None and idle != (line_of.get(slot) == self._line_of(slot)):
                raise RuntimeError(f"slot {slot}: holds {self._holds[slot]}, evictable {not idle}")
            num_idle += idle
            if named_key is None and (self._holds[slot] or self._fresh[slot] or self._wanted[slot]):
                raise RuntimeError(f"slot {slot} is held, fresh or wanted without a page")
            if self._wanted[slot] != (named_key in self._wanted_keys):
                raise RuntimeError(f"slot {slot} is marked {self._wanted[slot]} as wanted")
            if idle and self._rank[slot] > AGAIN:
                raise RuntimeError(f"slot {slot} is idle without a rank")
        if num_idle != self.evictable:
            raise RuntimeError(f"{self.evictable} evictable slots, recounted {num_idle}")
