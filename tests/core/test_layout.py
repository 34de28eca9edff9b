"""Layouts: what the fingerprint covers, and how slots are padded."""

from dataclasses import replace

import pytest

from forestage.core.layout import Component, Covers, HicacheNaming, ModelLayout

KV = Component("kv", 65536, shards=2)
STATE = Component("mamba", 262144, shards=2, covers=Covers.TAIL, window=1)
LAYOUT = ModelLayout("demo", 64, (KV, STATE), shards=2)


@pytest.mark.parametrize(
    "other",
    [
        replace(LAYOUT, name="demo2"),
        replace(LAYOUT, page_tokens=32),
        replace(LAYOUT, dtype="float16"),
        replace(LAYOUT, layout="layer_first"),
        replace(LAYOUT, shards=4),
        replace(LAYOUT, components=(KV,)),
        replace(LAYOUT, components=(STATE, KV)),
        replace(LAYOUT, components=(replace(KV, name="k"), STATE)),
        replace(LAYOUT, components=(replace(KV, bytes=65537), STATE)),
        replace(LAYOUT, components=(replace(KV, shards=1), STATE)),
        replace(LAYOUT, components=(KV, replace(STATE, window=2))),
        replace(LAYOUT, components=(KV, replace(STATE, covers=Covers.EVERY_PAGE))),
    ],
)
def test_the_fingerprint_changes_with_everything_that_changes_bytes(other: ModelLayout) -> None:
    assert other.fingerprint != LAYOUT.fingerprint


@pytest.mark.parametrize(
    "same",
    [
        replace(LAYOUT, components=(replace(KV, slots=7), replace(STATE, slots=9))),
        replace(LAYOUT, components=(replace(KV, window=3), STATE)),  # of no meaning for every_page
        replace(LAYOUT, hicache=HicacheNaming("other", 2)),
        replace(LAYOUT),
    ],
)
def test_the_fingerprint_stays_where_bytes_stay(same: ModelLayout) -> None:
    assert same.fingerprint == LAYOUT.fingerprint


def test_the_fingerprint_is_the_same_in_every_process_and_version() -> None:
    assert LAYOUT.fingerprint == "3038bbc96038ea84ca4e182889225cb1"


def test_no_two_layouts_share_a_fingerprint() -> None:
    """Names that could run together when they are put side by side."""
    pairs = [("ab", "c"), ("a", "bc"), ('a"', "c"), ("a,", "c"), ("a", ",c")]
    found = {
        ModelLayout(name, 64, (Component(component, size),)).fingerprint
        for name, component in pairs
        for size in (1, 11, 111)
    }
    assert len(found) == len(pairs) * 3


@pytest.mark.parametrize(("size", "stride"), [(1, 64), (64, 64), (65, 128), (4095, 4096), (4096, 4096), (4097, 8192)])
def test_every_shard_of_a_slot_starts_aligned(size: int, stride: int) -> None:
    component = Component("kv", size, shards=3)
    assert (component.shard_bytes, component.slot_bytes) == (stride, 3 * stride)


def test_components_are_told_apart() -> None:
    layout = ModelLayout("m", 16, (STATE, KV, replace(STATE, name="swa"), replace(KV, name="indexer")))
    assert (layout.every_page, layout.tails) == ((1, 3), (0, 2))
