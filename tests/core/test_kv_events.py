"""Events of the pool as KV events, in both forms."""

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forestage.core.kv_events import Blocks, HashForm, KvForm, encode_batch, write_event
from forestage.core.layout import Component, Covers, ModelLayout
from forestage.core.residency import Place, ResidencyEvent

KEY = bytes(range(1, 33))
TWO = ModelLayout(
    "m",
    16,
    (Component("kv", 64), Component("indexer", 64), Component("state", 64, covers=Covers.TAIL, window=1)),
)


def _event(stored: bool, component: str, key: bytes = KEY) -> ResidencyEvent:
    return ResidencyEvent(stored, Place("m", component), key)


def _written(form: KvForm, *events: ResidencyEvent, hash_form: HashForm = HashForm.BYTES) -> list[object]:
    blocks = Blocks(TWO, form, hash_form)
    written = [blocks.write(change) for change in blocks.take(events)]
    blocks.check_integrity()
    batch = msgpack.unpackb(encode_batch(12.5, written, 2))
    assert (batch[0], batch[2], len(batch)) == (12.5, 2, 3)
    events_read: list[object] = batch[1]
    return events_read


def test_arrays_tell_whole_pages() -> None:
    other = KEY[::-1]
    told = _written(
        KvForm.ARRAY,
        _event(True, "kv"),
        _event(True, "kv", other),
        _event(True, "state"),
        _event(True, "indexer"),
        _event(True, "indexer", other),
        _event(False, "state"),
        _event(False, "kv"),
        _event(False, "indexer"),
    )
    assert told == [
        ["BlockStored", [KEY, other], None, [], 16, None, "CPU", None],
        ["BlockRemoved", [KEY], "CPU"],
    ]


def test_maps_tell_of_each_component() -> None:
    told = _written(KvForm.MAP, _event(True, "kv"), _event(True, "state"), _event(False, "state"))
    stored = {
        "type": "BlockStored",
        "block_hashes": [KEY],
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 16,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
    }
    assert told == [
        {**stored, "group_idx": 0},
        {**stored, "group_idx": 2},
        {"type": "BlockRemoved", "block_hashes": [KEY], "medium": "CPU", "group_idx": 2},
    ]


def test_all_cleared() -> None:
    assert write_event(KvForm.ARRAY, (), None) == ["AllBlocksCleared"]
    assert write_event(KvForm.MAP, (), None) == {"type": "AllBlocksCleared"}


@pytest.mark.parametrize(
    ("form", "key", "expected"),
    [
        (HashForm.BYTES, KEY, KEY),
        (HashForm.VLLM, KEY, int.from_bytes(KEY, "big") & (2**64 - 1)),
        (HashForm.SGLANG, KEY, 0x0102030405060708),
        (HashForm.SGLANG, b"\xff" * 32, -1),
        (HashForm.VLLM, b"\xff" * 32, 2**64 - 1),
    ],
)
def test_hashes(form: HashForm, key: bytes, expected: object) -> None:
    told = _written(KvForm.MAP, _event(True, "kv", key), hash_form=form)
    assert [event["block_hashes"] for event in told if isinstance(event, dict)] == [[expected]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["kv", "indexer", "state"]), st.integers(0, 3)), max_size=40))
def test_what_is_told_adds_up_to_what_is_whole(flips: list[tuple[str, int]]) -> None:
    """Each step brings a page of a component or takes it away."""
    there: set[tuple[str, int]] = set()
    events = []
    for flip in flips:
        there ^= {flip}
        events.append(_event(flip in there, flip[0], bytes([flip[1]]) * 16))
    blocks = Blocks(TWO, KvForm.ARRAY, HashForm.BYTES)
    told: set[bytes] = set()
    for change in blocks.take(events):
        assert told.issuperset(change.keys) is not change.stored
        told ^= set(change.keys)
    blocks.check_integrity()
    assert told == {bytes([n]) * 16 for n in range(4) if {("kv", n), ("indexer", n)} <= there}
