"""The client's view of the pool, page by page."""

import gc
import os
from pathlib import Path

import pytest
import torch

from forestage.pool.file import PoolFile, PoolSettings
from forestage_client.pool_view import PoolFormatError, PoolView, SlotEntry, Stale
from pool.pages import DEMO, HYBRID, KV_BYTES, fill, key_of, payload


@pytest.fixture
def pool(shm: Path) -> PoolFile:
    # 80 slots a component and more: 64 pages are read in some tests.
    return PoolFile.create(PoolSettings(str(shm / "pool"), 10 << 20, pin="none"), (DEMO, HYBRID))


@pytest.mark.parametrize(
    ("index", "model", "component"), [(0, "demo", "kv"), (1, "acme/hybrid", "kv"), (2, "acme/hybrid", "mamba")]
)
def test_a_page_comes_whole_in_every_way(pool: PoolFile, index: int, model: str, component: str) -> None:
    content = fill(pool, index, 3, key_of(9))
    with PoolView(pool.path) as view:
        region = view.regions[model][component]
        assert len(content) == region.payload_bytes
        assert view.copy(model, component, 3, key_of(9)) == content
        assert view.copy(model, component, 3, key_of(9).hex().upper()) == content
        for buffer in (bytearray(len(content) + 5), memoryview(bytearray(len(content)))):
            assert view.read_into(model, component, 3, key_of(9), buffer) == len(content)
            assert bytes(buffer[: len(content)]) == content
        stamp = view.stamp(model, component, 3, key_of(9))
        shards = view.shard_views(model, component, 3)
        assert b"".join(shards) == content
        whole = view.view(model, component, 3)
        assert whole.readonly
        assert len(whole) == (region.shards - 1) * region.shard_bytes + region.bytes
        assert whole[-region.bytes :] == shards[-1]
        view.check(stamp)
    pool.close()


def test_what_is_not_there_is_stale(pool: PoolFile) -> None:
    fill(pool, 0, 3, key_of(9))
    with PoolView(pool.path) as view:
        buffer = bytearray(KV_BYTES)
        for slot, key in ((3, key_of(8)), (3, key_of(9)[:31]), (3, key_of(9) + b"\0"), (3, b""), (2, key_of(9))):
            with pytest.raises(Stale, match="does not hold"):
                view.copy("demo", "kv", slot, key)
            with pytest.raises(Stale):
                view.read_into("demo", "kv", slot, key, buffer)
        assert buffer == bytes(KV_BYTES)
        # A slot number of a larger pool is not this pool's page either.
        with pytest.raises(Stale, match="not in this pool"):
            view.copy("demo", "kv", view.regions["demo"]["kv"].slots, key_of(9))
        with pytest.raises(IndexError):
            view.copy("demo", "kv", -1, key_of(9))
        for model, component in (("demo", "mamba"), ("other", "kv")):
            with pytest.raises(KeyError, match=f"{model}/{component}"):
                view.copy(model, component, 0, key_of(9))
        with pytest.raises(ValueError, match="the buffer 65535"):
            view.read_into("demo", "kv", 3, key_of(9), bytearray(KV_BYTES - 1))
    pool.close()


def test_an_odd_generation_is_stale_whatever_else_the_entry_says(pool: PoolFile) -> None:
    fill(pool, 0, 3, key_of(9))
    with PoolView(pool.path) as view, open(pool.path, "r+b") as file:
        file.seek(view.regions["demo"]["kv"].table_offset + 3 * 128)
        file.write((2001).to_bytes(8, "little"))
        file.flush()
        with pytest.raises(Stale, match="does not hold"):
            view.copy("demo", "kv", 3, key_of(9))
        assert list(view.slots("demo", "kv"))[3] == SlotEntry(3, "filling", b"", 2001)
    pool.close()


@pytest.mark.parametrize("pages", [1, 64])
@pytest.mark.parametrize("reuse", ["refilled", "refilled with the same page", "filling", "evicted"])
def test_a_late_reader_finds_out(pool: PoolFile, pages: int, reuse: str) -> None:
    for number in range(pages):
        fill(pool, 0, number, key_of(number))
    with PoolView(pool.path) as view:
        stamps = [view.stamp("demo", "kv", number, key_of(number)) for number in range(pages)]
        for stamp in stamps:
            view.check(stamp)
        for number in range(pages):
            if reuse == "refilled":
                fill(pool, 0, number, key_of(number + 1000))
            elif reuse == "refilled with the same page":
                fill(pool, 0, number, key_of(number))
            elif reuse == "filling":
                pool.tables[0].begin_fill(number)
            else:
                pool.tables[0].clear(number)
        for number, stamp in enumerate(stamps):
            with pytest.raises(Stale, match="reused"):
                view.check(stamp)
            if reuse == "refilled with the same page":
                assert view.copy("demo", "kv", number, key_of(number)) == payload(key_of(number), KV_BYTES)
            else:
                with pytest.raises(Stale, match="does not hold"):
                    view.copy("demo", "kv", number, key_of(number))
    pool.close()


@pytest.mark.parametrize("in_order", [True, False])
def test_many_slots_are_looked_at_in_one_go(pool: PoolFile, monkeypatch: pytest.MonkeyPatch, in_order: bool) -> None:
    monkeypatch.setattr("forestage_client.pool_view._LOADS_IN_ORDER", in_order)
    for number in range(8):
        fill(pool, 0, number, key_of(number))
    pool.tables[0].clear(5)
    pool.tables[0].begin_fill(6)
    with PoolView(pool.path) as view:
        beyond = view.regions["demo"]["kv"].slots
        # In this order: there, by its hex form, another page, a part of the key, evicted, filling, not in this pool.
        slots = [3, 0, 1, 2, 5, 6, beyond]
        keys: list[bytes | str] = [
            key_of(3),
            key_of(0).hex().upper(),
            key_of(9),
            key_of(2)[:31],
            key_of(5),
            key_of(6),
            key_of(7),
        ]
        stamps = view.stamp_all("demo", "kv", slots, keys)
        assert [generation is not None for generation in stamps.generations] == [True, True] + [False] * 5
        assert view.held(stamps) == [True, True] + [False] * 5
        assert view.held(view.stamp_all("demo", "kv", [], [])) == []
        with pytest.raises(IndexError, match="slot -1"):
            view.stamp_all("demo", "kv", [0, -1], [key_of(0), key_of(1)])
        with pytest.raises(ValueError, match="1 keys, but 2 slots"):
            view.stamp_all("demo", "kv", [0, 1], [key_of(0)])
        with pytest.raises(KeyError, match="demo/mamba"):
            view.stamp_all("demo", "mamba", [0], [key_of(0)])
    pool.close()


@pytest.mark.parametrize("reuse", ["refilled", "refilled with the same page", "filling", "evicted"])
def test_each_slot_that_was_reused_is_told_from_the_others(pool: PoolFile, reuse: str) -> None:
    for number in range(8):
        fill(pool, 0, number, key_of(number))
    with PoolView(pool.path) as view:
        stamps = view.stamp_all("demo", "kv", range(8), [key_of(number) for number in range(8)])
        assert view.held(stamps) == [True] * 8
        for number in (2, 7):
            if reuse == "filling":
                pool.tables[0].begin_fill(number)
            elif reuse == "evicted":
                pool.tables[0].clear(number)
            else:
                fill(pool, 0, number, key_of(number if reuse == "refilled with the same page" else number + 1000))
        assert view.held(stamps) == [number not in {2, 7} for number in range(8)]
    pool.close()


@pytest.mark.parametrize("way", ["copy", "read_into"])
def test_a_change_between_the_two_looks_is_stale(pool: PoolFile, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    fill(pool, 0, 3, key_of(9))
    with PoolView(pool.path) as view:
        take = view._payload

        def late(*arguments: object) -> tuple[memoryview, ...]:
            fill(pool, 0, 3, key_of(9))
            return take(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(view, "_payload", late)
        buffer = (bytearray(KV_BYTES),) if way == "read_into" else ()
        with pytest.raises(Stale, match="reused"):
            getattr(view, way)("demo", "kv", 3, key_of(9), *buffer)
    pool.close()


def test_the_table_can_be_swept(pool: PoolFile) -> None:
    table = pool.tables[2]
    fill(pool, 2, 1, b"k" * 16)
    table.begin_fill(2)
    fill(pool, 2, 3, key_of(3))
    table.clear(3)
    with PoolView(pool.path) as view:
        assert list(view.slots("acme/hybrid", "mamba")) == [
            SlotEntry(0, "free", b"", 0),
            SlotEntry(1, "resident", b"k" * 16, 2),
            SlotEntry(2, "filling", b"", 1),
            SlotEntry(3, "free", b"", 4),
            SlotEntry(4, "free", b"", 0),
        ]
    pool.close()


def test_closing_with_live_views_hides_no_error_and_takes_no_memory_away(pool: PoolFile) -> None:
    content = fill(pool, 0, 0, key_of(0))
    view = PoolView(pool.path)
    live = view.view("demo", "kv", 0)
    tensor = view.tensor("demo", "kv", 0, torch.uint8, (KV_BYTES,))
    with pytest.raises(LookupError, match="mine"), view:
        raise LookupError("mine")
    assert view.closed
    view.close()
    with pytest.raises(ValueError, match="closed"):
        view.copy("demo", "kv", 0, key_of(0))
    with pytest.raises(ValueError, match="closed"):
        list(view.slots("demo", "kv"))
    pool.close()
    os.unlink(pool.path)
    gc.collect()
    assert bytes(live) == content
    assert bytes(tensor.numpy()) == content
    live.release()
    assert bytes(tensor.numpy()) == content
    del tensor
    gc.collect()
    with open("/proc/self/maps") as maps:
        assert pool.path not in maps.read()


def test_a_tensor_shares_the_memory(pool: PoolFile) -> None:
    content = fill(pool, 0, 5, key_of(5))
    with PoolView(pool.path) as view, PoolView(pool.path, writable=True) as writer:
        tensor = view.tensor("demo", "kv", 5, torch.bfloat16, (2, 4, -1 + 129, 32))
        assert tensor.shape == (2, 4, 128, 32)
        assert bytes(tensor.view(torch.uint8).flatten().numpy()) == content
        pool.tables[0].begin_fill(5)
        writer.tensor("demo", "kv", 5, torch.uint8, (KV_BYTES,)).fill_(7)
        pool.tables[0].publish(5, key_of(6))
        assert view.copy("demo", "kv", 5, key_of(6)) == b"\7" * KV_BYTES
        assert bytes(tensor.view(torch.uint8).flatten().numpy()) == b"\7" * KV_BYTES
        with pytest.raises(ValueError, match="needs 65538 bytes, the slot has 65536"):
            view.tensor("demo", "kv", 5, torch.bfloat16, (KV_BYTES // 2 + 1,))
        del tensor
    pool.close()


def test_only_a_writable_view_can_be_written(pool: PoolFile) -> None:
    with PoolView(pool.path) as view, PoolView(pool.path, writable=True) as writer:
        with pytest.raises(TypeError, match="read-only"):
            view.view("demo", "kv", 0)[0] = 1
        pool.tables[0].begin_fill(0)
        for shard in writer.shard_views("demo", "kv", 0):
            shard[:] = payload(key_of(0), len(shard))
        pool.tables[0].publish(0, key_of(0))
        assert view.copy("demo", "kv", 0, key_of(0)) == payload(key_of(0), KV_BYTES)
    pool.close()


@pytest.mark.parametrize("writable", [False, True])
def test_populating_maps_every_page_of_the_reader(pool: PoolFile, writable: bool) -> None:
    content = fill(pool, 0, 0, key_of(0))
    with PoolView(pool.path, writable=writable) as view:
        view.populate()
        with open("/proc/self/smaps") as smaps:
            mappings = smaps.read().split(pool.path)[1:]
        resident = sorted(int(text.split("Rss:")[1].split()[0]) * 1024 for text in mappings)
        assert resident == [pool.size, pool.size]
        assert view.copy("demo", "kv", 0, key_of(0)) == content
    pool.close()


def test_pinning_without_a_gpu_says_so(pool: PoolFile) -> None:
    with PoolView(pool.path) as view:
        assert view.pin() == torch.cuda.is_available()
    pool.close()


def test_attaching_to_something_else_is_refused(shm: Path, pool: PoolFile) -> None:
    with pytest.raises(FileNotFoundError):
        PoolView(shm / "nothing")
    for name, content in (("empty", b""), ("other", b"x" * 9000), ("short", Path(pool.path).read_bytes()[:5000])):
        (shm / name).write_bytes(content)
        with pytest.raises(PoolFormatError):
            PoolView(shm / name)
    with pytest.raises(PoolFormatError, match="not a regular file"):
        PoolView("/dev/null")
    pool.close()
    os.truncate(pool.path, pool.size - 4096)
    with pytest.raises(PoolFormatError, match="bytes, its header says"):
        PoolView(pool.path)
