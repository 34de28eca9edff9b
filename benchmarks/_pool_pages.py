"""A pool whose pages say what they are, and orders in which its slots may be copied.

Law: every 8-byte word of a page is its number, and its key begins with that number, so that any misplaced byte shows;
`runs_of` covers each place of the target once, in order.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from forestage.core.layout import Component, ModelLayout
from forestage.pool.file import PoolFile, PoolSettings

__all__ = ["COMPONENT", "MODEL", "Run", "filled_pool", "page_key", "page_number", "runs_of"]

MODEL, COMPONENT = "bench", "kv"
_HEAD_ROOM = 16 << 20


class Run(NamedTuple):
    """Neighbouring slots that go to neighbouring places: one copy."""

    slot: int
    to: int
    pages: int


def page_key(number: int) -> bytes:
    """Return the key of a page."""
    return number.to_bytes(8, "little") + bytes(24)


def page_number(key: bytes) -> int:
    """Return the number of a page."""
    return int.from_bytes(key[:8], "little")


def runs_of(slots: Sequence[int], longest: int = 1 << 30) -> list[Run]:
    """Cut slots, wanted one after another, into runs of at most `longest` pages."""
    runs: list[Run] = []
    for to, slot in enumerate(slots):
        last = runs[-1] if runs else Run(-2, 0, 0)
        if last.pages and slot == last.slot + last.pages and last.pages < longest:
            runs[-1] = last._replace(pages=last.pages + 1)
        else:
            runs.append(Run(slot, to, 1))
    return runs


@contextmanager
def filled_pool(path: Path, page_bytes: int, count: int) -> Iterator[None]:
    """Have a pool with so many resident pages; slot i holds page i + 1."""
    model = ModelLayout(MODEL, 64, (Component(COMPONENT, page_bytes, slots=count),))
    pool = PoolFile.create(PoolSettings(str(path), page_bytes * count + _HEAD_ROOM, pin="none"), (model,))
    try:
        for slot in range(count):
            number = slot + 1
            pool.tables[0].begin_fill(slot)
            (view,) = pool.shard_views(0, slot)
            view[:] = number.to_bytes(8, "little") * (page_bytes // 8)
            pool.tables[0].publish(slot, page_key(number), page=slot)
        yield
    finally:
        pool.close()
