"""The binary form, read back by the client's own reader, and the law of generations."""

import struct
import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.core.geometry import SLOT_ENTRY_BYTES, lay_out
from forestage.core.layout import Component, ModelLayout
from forestage.core.slots import SlotEvents
from forestage.pool import table as table_module
from forestage.pool.table import (
    FILLING,
    FREE,
    MAGIC,
    READY,
    RESIDENT,
    STARTING,
    STATE_OFFSET,
    Header,
    HeaderError,
    RegionTable,
    encode_header,
    read_header,
    set_state,
)
from forestage_client._pool_format import ENTRY, PoolFormatError, read_head
from pool.pages import DEMO, HYBRID, key_of

INSTANCE = bytes(range(16))


def head(*models: ModelLayout, state: int = READY, pool_bytes: int = 1 << 20) -> bytes:
    geometry = lay_out(models, pool_bytes)
    return encode_header(geometry, instance=INSTANCE, generation=7, file_bytes=pool_bytes, state=state)


def test_header_and_records_come_back_through_both_readers() -> None:
    made = head(DEMO, HYBRID)
    assert read_header(made) == Header(INSTANCE, 7, 1 << 20, 3, READY)
    read = read_head(made)
    assert (read.instance, read.generation, read.file_bytes) == (INSTANCE.hex(), 7, 1 << 20)
    for region, laid in zip(read.regions, lay_out((DEMO, HYBRID), 1 << 20).regions, strict=True):
        assert (region.model, region.component) == (laid.model.name, laid.component.name)
        assert (region.fingerprint, region.page_tokens) == (laid.model.fingerprint, laid.model.page_tokens)
        assert (region.offset, region.table_offset, region.slots) == (laid.offset, laid.table_offset, laid.slots)
        component = laid.component
        assert (region.slot_bytes, region.shard_bytes) == (component.slot_bytes, component.shard_bytes)
        assert (region.bytes, region.shards) == (component.bytes, component.shards)
        assert (region.covers, region.window) == (component.covers.value, component.window)


@given(st.text(min_size=1, max_size=200), st.text(min_size=1, max_size=40))
def test_names_come_back_whole_or_are_refused(model: str, component: str) -> None:
    try:
        names = (model.encode(), component.encode())
    except UnicodeEncodeError:
        return
    layout = ModelLayout(model, 1, (Component(component, 64),))
    if len(names[0]) > 128 or len(names[1]) > 32:
        with pytest.raises(ValueError, match="the pool file holds"):
            head(layout)
    elif "\0" not in model + component:
        (region,) = read_head(head(layout)).regions
        assert (region.model, region.component) == (model, component)


@given(st.integers(0, 4096 + 3 * 256 - 1), st.integers(1, 255))
def test_a_scribbled_header_is_noticed(at: int, change: int) -> None:
    made = bytearray(head(DEMO, HYBRID))
    made[at] ^= change
    covered = at < 64 or at >= 4096
    if covered:
        with pytest.raises(HeaderError) as raised:
            read_header(made)
        assert raised.value.foreign == (at < len(MAGIC))
        with pytest.raises(PoolFormatError):
            read_head(bytes(made))
    else:
        assert read_header(made).instance == INSTANCE


def test_a_header_cut_short_is_damaged_and_other_files_are_foreign() -> None:
    made = head(DEMO)
    for length in (8, 100, 4095, 4096, 4096 + 255):
        with pytest.raises(HeaderError) as raised:
            read_header(made[:length])
        assert not raised.value.foreign
        with pytest.raises(PoolFormatError):
            read_head(made[:length])
    for other in (b"", bytes(8192), b"\x7fELF" + bytes(8192)):
        with pytest.raises(HeaderError) as raised:
            read_header(other)
        assert raised.value.foreign


def test_a_reader_refuses_another_version_and_a_pool_in_the_making() -> None:
    made = bytearray(head(DEMO))
    made[8] = 2
    made[60:64] = zlib.crc32(made[4096:], zlib.crc32(made[:60])).to_bytes(4, "little")
    with pytest.raises(PoolFormatError, match="version 2"):
        read_head(bytes(made))
    with pytest.raises(HeaderError, match="version 2"):
        read_header(bytes(made))
    with pytest.raises(PoolFormatError, match="preparing"):
        read_head(head(DEMO, state=STARTING))


def test_the_state_changes_without_the_checksum() -> None:
    made = bytearray(head(DEMO, state=STARTING))
    set_state(memoryview(made), READY)
    assert made[STATE_OFFSET] == READY
    assert read_head(bytes(made)).generation == 7


def test_a_table_mirrors_the_slots_of_the_centre() -> None:
    (region,) = lay_out((ModelLayout("m", 64, (Component("kv", 4096, slots=1),)),), 1 << 20).regions
    events: SlotEvents = RegionTable(region, memoryview(bytearray(1 << 20)))
    events.begin_fill(0)
    events.publish(0, key_of(0))
    events.clear(0)


operations = st.lists(
    st.tuples(
        st.sampled_from(["begin_fill", "publish", "clear"]), st.integers(0, 3), st.binary(min_size=1, max_size=64)
    )
)


@given(operations)
def test_the_law_of_generations(operations: list[tuple[str, int, bytes]]) -> None:
    (region,) = lay_out((ModelLayout("m", 64, (Component("kv", 4096, slots=4),)),), 1 << 20).regions
    memory = bytearray(1 << 20)
    table = RegionTable(region, memoryview(memory))
    generations = [0] * 4
    contents: dict[int, bytes] = {}
    filling: set[int] = set()
    for name, slot, key in operations:
        at = region.table_offset + slot * SLOT_ENTRY_BYTES
        if name == "begin_fill":
            table.begin_fill(slot)
            filling.add(slot)
            contents.pop(slot, None)
        elif name == "publish" and slot not in filling:
            before = bytes(memory)
            with pytest.raises(ValueError, match="without begin_fill"):
                table.publish(slot, key)
            assert bytes(memory) == before
            continue
        elif name == "publish":
            table.publish(slot, key)
            filling.discard(slot)
            contents[slot] = key
        else:
            table.clear(slot)
            filling.discard(slot)
            contents.pop(slot, None)
        generation, state, key_len, _, _, length, _, found = ENTRY.unpack_from(memory, at)
        assert generation > generations[slot]
        assert generation % 2 == (slot in filling)
        assert generation == table.generation(slot)
        generations[slot] = generation
        expected = contents.get(slot, b"")
        assert state == (FILLING if slot in filling else RESIDENT if expected else FREE)
        if slot not in filling:
            assert (key_len, found, length) == (len(expected), expected.ljust(64, b"\0"), 4096 if expected else 0)
    # A table that comes to the same memory later goes on counting.
    again = RegionTable(region, memoryview(memory))
    assert [again.generation(slot) for slot in range(4)] == generations


class Recording:
    """Stands in for a precompiled struct and notes how the entry looks after each of its stores."""

    def __init__(self, real: struct.Struct, seen: list[bytes]) -> None:
        self._real = real
        self._seen = seen
        self.size = real.size

    def pack_into(self, entries: memoryview, offset: int, *values: object) -> None:
        self._real.pack_into(entries, offset, *values)
        self._seen.append(bytes(entries))


def test_an_entry_changes_only_under_an_odd_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    (region,) = lay_out((ModelLayout("m", 64, (Component("kv", 4096, slots=1),)),), 1 << 20).regions
    table = RegionTable(region, memoryview(bytearray(1 << 20)))
    seen = [bytes(SLOT_ENTRY_BYTES)]
    for name in ("_GENERATION", "_GENERATION_AND_STATE", "_CONTENT"):
        monkeypatch.setattr(table_module, name, Recording(getattr(table_module, name), seen))
    for number in range(2):
        table.begin_fill(0)
        table.publish(0, key_of(number))
    table.clear(0)
    table.begin_fill(0)
    table.clear(0)
    assert len(seen) > 10
    for before, after in pairwise(seen):
        generations = int.from_bytes(before[:8], "little"), int.from_bytes(after[:8], "little")
        assert generations[0] <= generations[1]
        if before[8:] != after[8:]:
            assert generations[1] % 2 == 1


@pytest.mark.parametrize("key", [b"", b"x" * 65])
def test_a_key_that_does_not_fit_is_refused(key: bytes) -> None:
    (region,) = lay_out((ModelLayout("m", 64, (Component("kv", 4096, slots=1),)),), 1 << 20).regions
    table = RegionTable(region, memoryview(bytearray(1 << 20)))
    table.begin_fill(0)
    with pytest.raises(ValueError, match="key of"):
        table.publish(0, key)
    assert table.generation(0) == 1
