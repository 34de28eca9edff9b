"""Pages of one model through the store that the SGLang adapter stands on, against a service in a process of its own."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from forestage_client import ForestageError, PoolView, Unreachable
from forestage_client.integrations._host_pages import BytesPage
from forestage_client.integrations._outages import Away, Mismatch
from forestage_client.integrations._sglang_settings import Rank, Settings
from forestage_client.integrations._shared_store import SharedStore
from support.configs import write_config
from support.running import running

KEYS = [hashlib.sha256(b"%d" % page).hexdigest() for page in range(12)]
ALONE = Rank(0, 1)
PAGES = [bytes((page * 7 + at) % 251 for at in range(4096)) for page in range(12)]


@dataclass(frozen=True, slots=True)
class ReusedPage(BytesPage):
    """A page whose slot is given to another one while it is copied."""

    table: Path
    generation_at: int

    def fill(self, source: int) -> None:
        BytesPage.fill(self, source)
        with open(self.table, "r+b") as file:
            file.seek(self.generation_at)
            generation = int.from_bytes(file.read(8), "little")
            file.seek(self.generation_at)
            file.write((generation + 2).to_bytes(8, "little"))


@contextmanager
def opened(folder: Path, model: str = "m", rank: Rank = ALONE) -> Iterator[SharedStore]:
    store = SharedStore(Settings(f"unix:{folder}/s", model, rank))
    try:
        yield store
    finally:
        store.close()


def configure(folder: Path, states: int = 0, slots: int = 64, shards: int = 1) -> Path:
    return write_config(folder, states=states, slots=slots, shards=shards, server=f'port = 0\nuds = "{folder}/s"')


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def put(store: SharedStore, first: int, last: int, states: tuple[int, ...] = ()) -> int:
    pages = {"kv": {page - first: BytesPage(bytearray(PAGES[page])) for page in range(first, last)}}
    if states:
        pages["state"] = {page - first: BytesPage(bytearray(PAGES[page][::-1])) for page in states}
    return store.write(KEYS[first:last], pages, {"state": [page - first for page in states]} if states else {})


def got(store: SharedStore, keys: list[str], component: str = "kv") -> list[bytes | None]:
    """Return what a read brings of each page of a component."""
    targets = [BytesPage(bytearray(4096)) for _ in keys]
    with store.fetch(keys) as fetched:
        there = fetched.copy(store.attach().components[component], 0, targets)
    return [bytes(target.data) if ok else None for target, ok in zip(targets, there, strict=True)]


def lost(store: SharedStore) -> bool:
    try:
        store.find(KEYS)
    except (Away, Unreachable):
        return True
    return False


def test_pages_and_states(tmp_path: Path) -> None:
    with running(configure(tmp_path, states=4)), opened(tmp_path) as store:
        assert put(store, 0, 8, states=(3, 7)) == 8
        found = store.find(KEYS)
        assert (found.pages.stored, found.pages.restorable, found.boundaries) == (8, 8, (4, 8))
        assert got(store, KEYS[:8]) == PAGES[:8]
        assert got(store, KEYS[:8], "state") == [None] * 7 + [PAGES[7][::-1]]
        assert got(store, KEYS[:6]) == [*PAGES[:4], None, None]
        assert got(store, KEYS[3:4], "state") == [PAGES[3][::-1]]
        assert put(store, 6, 10) == 4  # two of them are there
        assert store.find(KEYS).pages.stored == 10
        with store.fetch(KEYS[:4]) as fetched, pytest.raises(Mismatch, match="has 4096 bytes, SGLang's 100"):
            fetched.copy(store.attach().components["kv"], 0, [BytesPage(bytearray(100))])
        with pytest.raises(Mismatch, match="4096 bytes"):
            store.write(KEYS[10:11], {"kv": {0: BytesPage(bytearray(5))}}, {})
        info = store.attach()
        assert info.has_tails
        assert info.is_current()


def test_a_slot_that_is_reused_while_it_is_copied_is_no_page(tmp_path: Path) -> None:
    with running(configure(tmp_path)), opened(tmp_path) as store:
        assert put(store, 0, 4) == 4
        with store.fetch(KEYS[:4]) as fetched:
            view = fetched.attachment.view
            at = view.regions["m"]["kv"].table_offset + fetched.job.slots["kv"][2] * 128
            targets = [BytesPage(bytearray(4096)) for _ in range(4)]
            targets[1] = ReusedPage(bytearray(4096), Path(view.path), at)  # page 2 goes when it has been looked at
            assert fetched.copy(store.attach().components["kv"], 0, targets) == [True, True, False, True]


def shard_of(page: int, rank: int, name: str = "kv") -> bytearray:
    return bytearray(hashlib.sha256(f"{page} {rank} {name}".encode()).digest() * 128)


def put_shard(store: SharedStore, rank: int, first: int, last: int) -> int:
    """Write one rank's shard of pages, the last of them with a state."""
    state = last - first - 1
    pages = {
        "kv": {page - first: BytesPage(shard_of(page, rank)) for page in range(first, last)},
        "state": {state: BytesPage(shard_of(last - 1, rank, "state"))},
    }
    return store.write(KEYS[first:last], pages, {"state": [state]})


def test_ranks_write_their_shards_of_a_page_together(tmp_path: Path) -> None:
    ranks = [Rank(index, 2, 2) for index in range(2)]
    with (
        running(configure(tmp_path, states=4, shards=2)),
        opened(tmp_path, rank=ranks[0]) as first,
        opened(tmp_path, rank=ranks[1]) as second,
    ):
        assert put_shard(first, 0, 0, 4) == 4
        assert first.find(KEYS).pages.stored == 0  # half of each page
        assert put_shard(second, 1, 0, 4) == 4
        assert first.find(KEYS).boundaries == (4,)
        with ThreadPoolExecutor(2) as threads:
            more = [threads.submit(put_shard, store, rank, 4, 9) for rank, store in enumerate((first, second))]
            assert [done.result(60) for done in more] == [5, 5]
        for rank, store in enumerate((first, second)):
            kv, state = ([BytesPage(bytearray(4096)) for _ in range(9)] for _ in range(2))
            with store.fetch(KEYS[:9]) as fetched:
                assert fetched.copy(store.attach().components["kv"], rank, kv) == [True] * 9
                assert fetched.copy(store.attach().components["state"], rank, state) == [False] * 8 + [True]
            assert [page.data for page in kv] == [shard_of(page, rank) for page in range(9)]
            assert state[8].data == shard_of(8, rank, "state")


class TornPage(BytesPage):
    """A page that is gone when it is to be copied."""

    __slots__ = ()

    def drain(self, target: int) -> None:
        raise OSError("it is gone")


def test_a_rank_that_fails_takes_the_write_from_the_others(tmp_path: Path) -> None:
    ranks = [Rank(index, 2, 2) for index in range(2)]
    with (
        running(configure(tmp_path, shards=2)),
        opened(tmp_path, rank=ranks[0]) as first,
        opened(tmp_path, rank=ranks[1]) as second,
        opened(tmp_path, rank=Rank(0, 2, 2, is_mla=True)) as other,
    ):
        page = {"kv": {0: BytesPage(shard_of(0, 0))}}
        assert first.write(KEYS[:1], page, {}) == 1
        with pytest.raises(OSError, match="it is gone"):
            second.write(KEYS[:1], {"kv": {0: TornPage(shard_of(0, 1))}}, {})
        assert second.write(KEYS[:1], page, {}) == 1  # begins anew: it waits for rank 0, which does not know
        assert first.find(KEYS[:1]).pages.stored == 0
        assert first.write(KEYS[:1], page, {}) == 1
        assert first.find(KEYS[:1]).pages.stored == 1
        with pytest.raises(Mismatch, match="SGLang lets 1 ranks write"):
            other.write(KEYS[1:2], page, {})


def test_no_lease_outlives_a_read(tmp_path: Path) -> None:
    with running(configure(tmp_path, slots=8)), opened(tmp_path) as store:
        assert put(store, 0, 6) == 6  # of which 4 have room at first
        for _ in range(5):
            assert got(store, KEYS[:6]) == PAGES[:6]
        # All slots can be had for others, and the pages come back from L3.
        assert put(store, 6, 12) == 6
        until(lambda: got(store, KEYS[:6]) == PAGES[:6])


def test_a_service_that_is_away(tmp_path: Path) -> None:
    config = configure(tmp_path)
    with opened(tmp_path) as store:
        assert lost(store)
        with pytest.raises((Away, ForestageError)):
            put(store, 0, 1)
        with running(config) as service:
            until(lambda: not lost(store))
            assert put(store, 0, 4) == 4
            attached = store.attach()
            service.process.kill()
            service.process.wait(20)
            began = time.monotonic()
            assert all(lost(store) for _ in range(20))
            assert time.monotonic() - began < 5
        with running(config):
            until(lambda: not lost(store))
            assert got(store, KEYS[:4]) == PAGES[:4]
            assert store.attach() is attached  # the pool was adopted
        os.unlink(attached.view.path)
        with running(config):
            until(lambda: not lost(store))
            assert not attached.is_current()
            assert put(store, 0, 4) == 4
            assert store.attach() is not attached
            assert got(store, KEYS[:4]) == PAGES[:4]


def test_a_service_for_another_model(tmp_path: Path) -> None:
    with running(configure(tmp_path)), opened(tmp_path, "other") as store:
        with pytest.raises(Mismatch, match="no model 'other', but m"):
            store.attach()
        with pytest.raises(ForestageError):
            store.find(KEYS)


def test_a_pool_that_may_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forestage_client.integrations import _shared_store

    class Reading(PoolView):
        def __init__(self, path: str, *, writable: bool = False) -> None:
            if writable:  # tests may run as root, whom no mode keeps out
                raise PermissionError(path)
            super().__init__(path)

    with running(configure(tmp_path)), opened(tmp_path) as writer, opened(tmp_path) as store:
        assert put(writer, 0, 2) == 2
        monkeypatch.setattr(_shared_store, "PoolView", Reading)
        assert got(store, KEYS[:2]) == PAGES[:2]
        with pytest.raises(Mismatch, match=r"pool\.mode"):
            put(store, 2, 3)
