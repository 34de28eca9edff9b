"""The writes of the fake service: slots reserved for pages to come, which L3 has as soon as they are committed.

Law: an open write owns its reserved slots; a committed, dropped or expired one owns none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forestage_client._errors import BadRequest, Gone, NotFound
from forestage_client._fake_pool import FakePool, Shelf

__all__ = ["FakeWrite", "FakeWrites"]

EXPIRE_S = 30.0


@dataclass(slots=True, eq=False)
class FakeWrite:
    """One reservation; `slots` by shelf and page, until it is committed or over. `counts` as the service tells them."""

    id: str
    pool: FakePool
    keys: Sequence[bytes]
    slots: list[tuple[Shelf, dict[int, int]]]
    expires_s: float
    is_expired: bool = False
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("committed", "durable", "failed"), 0))


class FakeWrites:
    """Writes by id. Not thread-safe; raises ForestageErrors as refusals."""

    def __init__(self) -> None:
        self._by_id: dict[str, FakeWrite] = {}
        self._issued = 0

    @property
    def num_open(self) -> int:
        """How many writes own slots."""
        return sum(bool(write.slots) for write in self._by_id.values())

    def begin(
        self, pool: FakePool, keys: Sequence[bytes], tails: Mapping[str, Sequence[int]], now_s: float
    ) -> dict[str, object]:
        """Reserve slots for what is neither resident nor in L3, up to the first page without room."""
        pages = {shelf.component.name: self._pages(shelf, len(keys), tails) for shelf in pool.shelves}
        if unknown := sorted(set(tails) - {s.component.name for s in pool.shelves if s.component.is_tail}):
            raise BadRequest(f"tails: no tail component {', '.join(unknown)}")
        held = pool.hold([(s, keys[p]) for s in pool.shelves for p in pages[s.component.name] if keys[p] in s.resident])
        wanted = [
            (shelf, sorted(page for page in pages[shelf.component.name] if not shelf.is_anywhere(keys[page])))
            for shelf in pool.shelves
        ]
        granted, reason = len(keys), None
        for shelf, missing in wanted:
            room = len(shelf.free) + len(shelf.idle)
            if room < len(missing) and missing[room] < granted:
                granted, reason = missing[room], "host_capacity"
        slots = [(shelf, {page: shelf.take() for page in missing if page < granted}) for shelf, missing in wanted]
        pool.let_go(held)
        self._issued += 1
        write = FakeWrite(f"write-{self._issued}", pool, keys, slots, now_s + EXPIRE_S)
        self._by_id[write.id] = write
        needed = {page for _, missing in wanted for page in missing}
        return {
            "id": write.id,
            "stored": [page for page in range(len(keys)) if page not in needed],
            "granted": granted,
            "reason": reason,
            "slots": {shelf.component.name: [own.get(p) for p in pages[shelf.component.name]] for shelf, own in slots},
            "expires_in_ms": round(EXPIRE_S * 1000),
        }

    def commit(self, write_id: str) -> dict[str, int]:
        """Make the pages resident, and let L3 have them; return the counts. Idempotent."""
        write = self._find(write_id)
        if "duplicate" in write.counts:
            return write.counts
        reserved = {page for _, slots in write.slots for page in slots}
        committed: set[int] = set()
        for shelf, slots in write.slots:
            for page, slot in slots.items():
                key = write.keys[page]
                if shelf.is_resident(key):
                    shelf.free.append(slot)
                    continue
                shelf.resident[key] = slot
                shelf.idle[key] = None
                shelf.stored.add(key)
                committed.add(page)
        write.slots = []
        done = len(committed)
        write.counts = {"committed": done, "durable": done, "failed": 0, "duplicate": len(reserved) - done}
        return write.counts

    def status(self, write_id: str) -> dict[str, int]:
        """Return the counts of a write."""
        return self._find(write_id).counts

    def drop(self, write_id: str) -> None:
        """Forget a write and give its slots back. Idempotent."""
        write = self._by_id.pop(write_id, None)
        if write is not None:
            self._take_back(write)

    def expire(self, now_s: float) -> None:
        """End the writes whose time is over."""
        for write in self._by_id.values():
            if write.slots and write.expires_s <= now_s:
                write.is_expired = True
                self._take_back(write)

    def _find(self, write_id: str) -> FakeWrite:
        write = self._by_id.get(write_id)
        if write is None:
            raise NotFound(f"no write {write_id}", slug="unknown-write")
        if write.is_expired:
            raise Gone(f"write {write_id} has expired", slug="write-gone")
        return write

    def _take_back(self, write: FakeWrite) -> None:
        for shelf, slots in write.slots:
            shelf.free.extend(slots.values())
        write.slots = []

    def _pages(self, shelf: Shelf, num_pages: int, tails: Mapping[str, Sequence[int]]) -> Sequence[int]:
        if not shelf.component.is_tail:
            return range(num_pages)
        pages = tails.get(shelf.component.name, ())
        if len(set(pages)) < len(pages) or not all(0 <= page < num_pages for page in pages):
            raise BadRequest(f"tails: {shelf.component.name} must name different pages below {num_pages}")
        return pages
