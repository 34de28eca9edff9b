"""Laws of the pool's geometry."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.core.geometry import (
    HEADER_BYTES,
    REGION_BYTES,
    SLOT_ENTRY_BYTES,
    GeometryError,
    lay_out,
)
from forestage.core.layout import Component, Covers, ModelLayout
from pool.pages import DEMO, HYBRID

components = st.builds(
    Component,
    name=st.just("c"),
    bytes=st.integers(1, 40_000),
    shards=st.integers(1, 4),
    covers=st.sampled_from(Covers),
    window=st.integers(0, 3),
    slots=st.none() | st.integers(1, 40),
)


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelLayout, ...]:
    made = []
    for number in range(draw(st.integers(1, 3))):
        drawn = draw(st.lists(components, min_size=1, max_size=3))
        named = tuple(Component(f"c{i}", c.bytes, c.shards, c.covers, c.window, c.slots) for i, c in enumerate(drawn))
        made.append(ModelLayout(f"m{number}", 64, named))
    return tuple(made)


@given(models(), st.integers(0, 40_000_000))
def test_regions_are_disjoint_aligned_and_within_the_pool(models: tuple[ModelLayout, ...], pool_bytes: int) -> None:
    try:
        geometry = lay_out(models, pool_bytes)
    except GeometryError as error:
        # The number it names is honest: with that much it works, with less it does not.
        need = int("".join(c if c.isdigit() else " " for c in str(error)).split()[0])
        assert need > pool_bytes
        lay_out(models, need)
        with pytest.raises(GeometryError):
            lay_out(models, need - 1)
        return
    spans = [(0, HEADER_BYTES + REGION_BYTES * len(geometry.regions))]
    for region in geometry.regions:
        assert region.offset % 4096 == 0
        assert region.table_offset % 4096 == 0
        assert region.slots >= 1
        spans.append((region.table_offset, region.table_offset + region.slots * SLOT_ENTRY_BYTES))
        spans.append((region.offset, region.offset + region.data_bytes))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] <= geometry.used_bytes <= pool_bytes


@given(models(), st.integers(500_000, 40_000_000))
def test_slots_are_as_configured_and_shares_are_equal(models: tuple[ModelLayout, ...], pool_bytes: int) -> None:
    try:
        geometry = lay_out(models, pool_bytes)
    except GeometryError:
        return
    shared = {region.slots for region in geometry.regions if region.component.slots is None}
    assert len(shared) <= 1
    assert all(r.slots == r.component.slots for r in geometry.regions if r.component.slots is not None)
    wanted = [(model.name, component.name) for model in models for component in model.components]
    assert [(region.model.name, region.component.name) for region in geometry.regions] == wanted
    # One slot more for each would not have fitted.
    if shared:
        (slots,) = shared
        more = tuple(
            ModelLayout(
                m.name,
                64,
                tuple(
                    Component(c.name, c.bytes, c.shards, c.covers, c.window, c.slots or slots + 1) for c in m.components
                ),
            )
            for m in models
        )
        with pytest.raises(GeometryError):
            lay_out(more, pool_bytes)


@pytest.mark.parametrize("pool_bytes", [-1, 0, 1, HEADER_BYTES, 65536])
def test_a_pool_without_room_for_one_slot_is_refused(pool_bytes: int) -> None:
    with pytest.raises(GeometryError, match=rf"need at least \d+ bytes .* have {pool_bytes}$"):
        lay_out((DEMO,), pool_bytes)


def test_configured_slots_that_do_not_fit_are_refused() -> None:
    model = ModelLayout("m", 64, (Component("kv", 4096, slots=100),))
    with pytest.raises(GeometryError, match="the configured slots need"):
        lay_out((model,), 100 * 4096)


def test_a_region_is_found_by_its_names() -> None:
    geometry = lay_out((DEMO, HYBRID), 1 << 20)
    assert geometry.region("acme/hybrid", "mamba").slots == 5
    with pytest.raises(KeyError):
        geometry.region("demo", "mamba")
