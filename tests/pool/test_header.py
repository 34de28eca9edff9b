"""The start of the file, read back by the client's own reader; and starts that are killed while they sign it."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.core.geometry import lay_out
from forestage.core.layout import Component, ModelLayout
from forestage.pool.header import (
    MAGIC,
    READY,
    STARTING,
    STATE_OFFSET,
    Header,
    HeaderError,
    Origin,
    encode_header,
    last_generation,
    read_header,
    set_start,
    set_state,
)
from forestage_client._pool_format import PoolFormatError, read_head
from pool.moments import moments
from pool.pages import DEMO, HYBRID

INSTANCE = bytes(range(16))
ORIGIN = Origin(numa_node=1, inode=77, boot=bytes(range(100, 116)))
COVERED = 68  # bytes of the header that its checksum makes safe, itself included
GENERATION, AGAIN = slice(128, 136), slice(152, 160)


def head(*models: ModelLayout, state: int = READY, pool_bytes: int = 1 << 20) -> bytes:
    geometry = lay_out(models, pool_bytes)
    return encode_header(geometry, instance=INSTANCE, generation=7, file_bytes=pool_bytes, state=state, origin=ORIGIN)


def test_header_and_records_come_back_through_both_readers() -> None:
    made = head(DEMO, HYBRID)
    assert read_header(made) == Header(INSTANCE, 7, 1 << 20, 3, READY, ORIGIN)
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
    generation, again = (int.from_bytes(made[where], "little") for where in (GENERATION, AGAIN))
    if at < COVERED or at >= 4096 or generation - again not in {0, 1}:
        with pytest.raises(HeaderError) as raised:
            read_header(made)
        assert raised.value.foreign == (at < len(MAGIC))
    else:
        # The instance is random anyway, and one generation ahead is what a killed start leaves.
        assert read_header(made).generation == again
    if at < COVERED or at >= 4096 or generation != again:
        with pytest.raises(PoolFormatError):
            read_head(bytes(made))


def test_a_header_cut_short_is_damaged_and_other_files_are_foreign() -> None:
    made = head(DEMO)
    for length in (1, 7, 8, 100, 4095, 4096, 4096 + 255):
        with pytest.raises(HeaderError) as raised:
            read_header(made[:length])
        assert not raised.value.foreign
        with pytest.raises(PoolFormatError):
            read_head(made[:length])
    for other in (b"x", bytes(8192), b"\x7fELF" + bytes(8192)):
        with pytest.raises(HeaderError) as raised:
            read_header(other)
        assert raised.value.foreign


def test_a_reader_refuses_another_version_and_a_pool_in_the_making() -> None:
    made = bytearray(head(DEMO))
    made[8] = 2
    made[64:68] = zlib.crc32(made[4096:], zlib.crc32(made[:64])).to_bytes(4, "little")
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


def test_a_start_that_is_killed_while_it_signs_leaves_a_header_that_counts_on() -> None:
    """Once, and again while the damage of the first kill is mended."""
    made = bytearray(head(DEMO))
    first = moments(made, lambda: set_start(memoryview(made), b"a" * 16, 8))
    assert {read_header(seen).generation for seen in first} == {7, 8}
    torn = [seen for seen in first if seen[GENERATION] != seen[AGAIN]]
    assert torn
    for seen in torn:
        with pytest.raises(PoolFormatError, match="preparing"):
            read_head(seen)
        mended = bytearray(seen)
        again = moments(mended, lambda: set_start(memoryview(mended), b"b" * 16, 8))  # noqa: B023
        assert {read_header(other).generation for other in again} == {7, 8}
        assert read_head(again[-1]).instance == (b"b" * 16).hex()


def test_a_damaged_header_may_still_name_its_generation() -> None:
    made = bytearray(head(DEMO))
    made[:100] = bytes(100)
    assert last_generation(made) == 7
    assert last_generation(made[:4095]) == 0
    made[AGAIN] = (8).to_bytes(8, "little")
    assert last_generation(made) == 0
    made[GENERATION] = made[AGAIN] = b"\xff" * 8
    assert last_generation(made) == 0
