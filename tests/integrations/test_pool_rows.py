"""The pool as an engine that asks nobody sees it: where pages lie, when they went, and whole rows or none."""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forestage.core.layout import Component, Covers, ModelLayout
from forestage.pool.file import PoolFile, PoolSettings
from forestage_client._memory import address_of
from forestage_client.integrations._outages import Mismatch
from forestage_client.integrations._pool_rows import Attachment, PoolRows, RowGroup, RowModel
from forestage_client.integrations._resident_pages import ResidentPages
from forestage_client.pool_view import PoolView

ROW = 8192
GROUPS = (RowGroup(64, None), RowGroup(64, 1))
ENGINE = RowModel("acme/m", ROW, GROUPS)
LAYOUT = ModelLayout(
    "acme/m", 64, (Component("kv", 4096, shards=2, slots=40), Component("state", ROW, 1, Covers.TAIL, 1, 8)), shards=2
)
KEYS = [hashlib.sha256(bytes([page])).digest() for page in range(60)]


def content(key: bytes, size: int = ROW) -> bytes:
    return (key * (size // len(key) + 1))[:size]


def publish(pool: PoolFile, slot: int, key: bytes, region: int = 0) -> None:
    """Put a page into a slot as the service does when it was read."""
    pool.tables[region].begin_fill(slot)
    views = pool.shard_views(region, slot)
    data = memoryview(content(key))
    for shard, view in enumerate(views):
        view[:] = data[shard * len(view) : (shard + 1) * len(view)]
    pool.tables[region].publish(slot, key, 0)


@pytest.fixture
def settings(tmp_path: Path) -> PoolSettings:
    return PoolSettings(str(tmp_path / "pool"), 1 << 20, pin="none")


@pytest.fixture
def pool(settings: PoolSettings) -> Iterator[PoolFile]:
    pool = PoolFile.create(settings, (LAYOUT,))
    yield pool
    pool.close()


def attached(rows: PoolRows) -> Attachment:
    attachment = rows.attach()
    assert attachment is not None
    for pages in attachment.pages:
        pages.check_integrity()
    return attachment


def test_pages_are_found_where_they_lie_now(pool: PoolFile) -> None:
    rows = PoolRows(pool.path, ENGINE)
    assert attached(rows).find(0, KEYS[0]) is None
    publish(pool, 3, KEYS[0])
    publish(pool, 2, KEYS[0], region=1)
    assert attached(rows).find(0, KEYS[0]) == 3
    assert attached(rows).find(1, KEYS[0]) == 2
    assert attached(rows).find(2, KEYS[0]) is None
    pool.tables[0].clear(3)
    assert rows.attach() is not None
    publish(pool, 1, KEYS[0])
    assert attached(rows).find(0, KEYS[0]) == 1


def test_what_went_since_the_look_is_not_found(pool: PoolFile) -> None:
    rows = PoolRows(pool.path, ENGINE)
    publish(pool, 3, KEYS[0])
    attachment = attached(rows)
    publish(pool, 3, KEYS[1])
    assert attachment.find(0, KEYS[0]) is None
    assert attachment.find(0, KEYS[1]) is None  # found with the next look
    assert attached(rows).find(0, KEYS[1]) == 3


def test_a_slot_that_is_lent_or_read_into_holds_nothing(pool: PoolFile) -> None:
    rows = PoolRows(pool.path, ENGINE)
    publish(pool, 3, KEYS[0])
    publish(pool, 4, KEYS[1])
    attached(rows)
    pool.tables[0].begin_fill(3)
    pool.tables[0].begin_fill(4, lent=True)
    assert [attached(rows).find(0, key) for key in KEYS[:2]] == [None, None]


def test_the_table_turned_around_stays_right_under_any_changes(pool: PoolFile) -> None:
    chance = random.Random(7)
    truth: dict[int, bytes] = {}
    with PoolView(pool.path) as view:
        pages = ResidentPages(view, "acme/m", "kv")
        for _ in range(300):
            for slot in chance.sample(range(40), chance.randrange(1, 12)):
                free = [key for key in KEYS if key not in truth.values()]
                truth.pop(slot, None)
                pool.tables[0].begin_fill(slot)
                if chance.random() < 0.7:
                    truth[slot] = chance.choice(free)
                    pool.tables[0].publish(slot, truth[slot], 0)
                elif chance.random() < 0.5:
                    pool.tables[0].clear(slot)
            pages.refresh()
            pages.check_integrity()
            assert {pages.find(key): key for key in truth.values()} == truth
            assert len(pages) == len(truth)
        assert pages.refresh() == 0


def test_a_row_is_filled_whole_or_not_at_all(pool: PoolFile) -> None:
    rows = PoolRows(pool.path, ENGINE)
    publish(pool, 3, KEYS[0])
    row = memoryview(bytearray(ROW))
    attachment = attached(rows)
    assert attachment.fill(0, KEYS[0], 3, address_of(row))
    assert row == content(KEYS[0])
    publish(pool, 3, KEYS[1])
    assert not attachment.fill(0, KEYS[0], 3, address_of(row))


def test_a_pool_comes_and_is_replaced(settings: PoolSettings) -> None:
    rows = PoolRows(settings.path, ENGINE)
    assert rows.attach() is None
    pool = PoolFile.create(settings, (LAYOUT,))
    publish(pool, 3, KEYS[0])
    first = attached(rows)
    assert first.find(0, KEYS[0]) == 3
    pool.close()

    # Started anew on the same file: the view goes on.
    pool = PoolFile.create(settings, (LAYOUT,))
    assert attached(rows) is first
    assert first.find(0, KEYS[0]) == 3
    pool.close()

    kv, state = LAYOUT.components
    other = PoolFile.create(settings, (replace(LAYOUT, components=(replace(kv, slots=41), state)),))
    assert attached(rows).find(0, KEYS[0]) is None
    other.close()
    Path(settings.path).unlink()
    assert rows.attach() is None


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (RowModel("acme/n", ROW, GROUPS), "the pool has no model 'acme/n', but acme/m"),
        (RowModel("acme/m", 4096, GROUPS), "a page of kv of model 'acme/m' has 8192 bytes, a chunk of the engine 4096"),
        (RowModel("acme/m", ROW, (RowGroup(16, None), GROUPS[1])), "64 tokens, a chunk of the engine 16"),
        (RowModel("acme/m", ROW, GROUPS[:1]), "has 2 components, the engine 1 groups"),
        (RowModel("acme/m", ROW, GROUPS, ("kv", "mamba")), "has no component 'mamba', but kv, state"),
        (RowModel("acme/m", ROW, GROUPS, ("state", "kv")), "covers a tail of 1 pages, its group needs all"),
        (RowModel("acme/m", ROW, (GROUPS[0], RowGroup(64, 2))), "covers a tail of 1 pages, its group needs 2"),
    ],
)
def test_another_model_is_not_used(pool: PoolFile, engine: RowModel, words: str) -> None:
    rows = PoolRows(pool.path, engine)
    for _ in range(2):  # also when it need not be looked at again
        with pytest.raises(Mismatch) as caught:
            rows.attach()
        assert words in str(caught.value)
