"""The plan: the contract's examples, and every length against a search over all of them."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.test_prefix import prefixes
from forestage.core.plan import Plan, make_plan
from forestage.core.prefix import PageStatus, PrefixMap
from support.engine_driver import kv_model


def _hybrid(pages: int, states: Sequence[int], device_pages: int = 0, resident: int = 0, window: int = 1) -> PrefixMap:
    """A stored prefix with tail states (of a whole window) that end at some lengths; `resident` pages are idle."""
    kv = bytearray([PageStatus.STORED] * pages)
    kv[:resident] = bytes([PageStatus.IDLE] * resident)
    tail = bytearray(pages)
    for length in states:
        first = max(0, length - window)
        tail[first:length] = bytes([PageStatus.STORED] * (length - first))
    kv[:device_pages] = tail[:device_pages] = bytes(device_pages)
    return PrefixMap(kv_model(windows=[window]), device_pages, [kv, tail])


@pytest.mark.parametrize(
    ("room", "granted"),
    [
        ((30, 8), 24),
        ((40, 8), 40),
        ((39, 8), 24),
        ((24, 1), 24),
        ((23, 8), 16),
        ((15, 8), 0),
        ((48, 0), 0),
        ((0, 8), 0),
    ],
)
def test_what_fits_is_cut_at_a_boundary(room: tuple[int, int], granted: int) -> None:
    plan = make_plan(_hybrid(48, [16, 24, 40]), room)
    assert (plan.host, plan.stored, plan.restorable, plan.granted, plan.usable) == (0, 48, 40, granted, 0)


def test_no_boundary_at_all() -> None:
    assert make_plan(_hybrid(12, []), (99, 99)) == Plan(12, 0, 12, 0, 0, 0, True)


def test_device_pages_are_a_boundary_and_need_nothing() -> None:
    plan = make_plan(_hybrid(22, [16], device_pages=20), (99, 99))
    assert (plan.host, plan.stored, plan.restorable, plan.granted, plan.usable) == (20, 22, 20, 20, 20)
    assert make_plan(_hybrid(22, [22], device_pages=20), (2, 1)).granted == 22


def test_a_window_that_begins_on_the_device_needs_only_its_rest() -> None:
    prefix = _hybrid(10, [8], device_pages=6, window=4)
    assert make_plan(prefix, (9, 2)).granted == 8
    assert make_plan(prefix, (9, 1)).granted == 7
    assert make_plan(prefix, (9, 0)).granted == 6


def test_short_of_state_slots_a_shorter_window_is_granted() -> None:
    prefix = _hybrid(10, [2, 8], window=4)
    assert make_plan(prefix, (10, 4)).granted == 8
    assert make_plan(prefix, (10, 3)).granted == 2  # its window is cut off at page 0
    assert make_plan(prefix, (10, 1)).granted == 1
    assert make_plan(prefix, (10, 0)).granted == 0


def test_resident_pages_are_paid_for_but_not_read_again() -> None:
    prefix = _hybrid(12, [12], resident=8)
    assert make_plan(prefix, (12, 1)).granted == 12
    assert make_plan(prefix, (11, 1)).granted == 0
    prefix.status[0][:8] = bytes([PageStatus.HELD] * 8)
    held = PrefixMap(prefix.layout, 0, prefix.status)
    assert make_plan(held, (4, 1)).granted == 12


@pytest.mark.parametrize(("min_pages", "worth"), [(0, True), (1, True), (4, True), (5, False)])
def test_the_gain_decides(min_pages: int, worth: bool) -> None:
    assert Plan(12, 8, 12, 12, 12, 8, True).worth_reading(min_pages) is worth


def test_no_gain_is_never_worth_a_read() -> None:
    assert not Plan(12, 8, 8, 8, 8, 8, True).worth_reading(0)


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(prefixes(), st.data())
def test_every_length_is_the_largest_there_is(prefix: PrefixMap, data: st.DataObject) -> None:
    components = range(len(prefix.layout.components))
    room = [data.draw(st.integers(0, prefix.requested + 1)) for _ in components]
    plan = make_plan(prefix, room)
    lengths = range(prefix.device_pages, prefix.requested + 1)

    def fits(length: int) -> bool:
        return all(prefix.cost(c, length) <= room[c] for c in components)

    boundaries = [length for length in lengths if prefix.is_boundary(length)]
    usable = [length for length in lengths if prefix.is_boundary(length, resident=True)]
    assert plan.requested == prefix.requested
    assert (plan.host, plan.stored) == (prefix.reach(resident=True), prefix.reach())
    assert plan.restorable == max(length for length in boundaries if length <= plan.stored)
    assert plan.granted == max(length for length in boundaries if length <= plan.stored and fits(length))
    assert plan.usable == max(length for length in usable if length <= min(plan.host, plan.granted) and fits(length))
    tails = prefix.layout.tails
    assert plan.keep_usable == all(prefix.joint_cost(c, plan.granted, plan.usable) <= room[c] for c in tails)
