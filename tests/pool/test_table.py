"""The slot tables in binary form: the law of generations, and what can be recovered after a kill at any moment."""

from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.core.geometry import SLOT_ENTRY_BYTES, Region, lay_out
from forestage.core.layout import Component, ModelLayout
from forestage.core.slots import SlotEvents
from forestage.pool.table import FILLING, FREE, LENT, RESIDENT, AdoptedPage, Recovered, RegionTable
from forestage_client._pool_format import ENTRY
from pool.moments import moments
from pool.pages import key_of, payload

PAGE_BYTES = 256


def region_of(slots: int, size: int = 4096) -> Region:
    (region,) = lay_out((ModelLayout("m", 64, (Component("kv", size, slots=slots),)),), 1 << 20).regions
    return region


def test_a_table_mirrors_the_slots_of_the_centre() -> None:
    region = region_of(1)
    memory = bytearray(1 << 20)
    events: SlotEvents = RegionTable(region, memoryview(memory))
    events.begin_fill(0)
    events.publish(0, key_of(0))
    events.clear(0)
    events.begin_fill(0, lent=True)
    events.publish(0, key_of(1), page=3, dirty=True)
    events.set_clean(0)
    assert RegionTable(region, memoryview(memory)).recover().pages == [AdoptedPage(0, key_of(1), 3, False)]


operations = st.lists(
    st.tuples(
        st.sampled_from(["begin_fill", "lend", "publish", "clear"]),
        st.integers(0, 3),
        st.binary(min_size=1, max_size=64),
    )
)


@given(operations)
def test_the_law_of_generations(operations: list[tuple[str, int, bytes]]) -> None:
    region = region_of(4)
    memory = bytearray(1 << 20)
    table = RegionTable(region, memoryview(memory))
    generations = [0] * 4
    contents: dict[int, bytes] = {}
    filling: dict[int, int] = {}
    for name, slot, key in operations:
        at = region.table_offset + slot * SLOT_ENTRY_BYTES
        if name in {"begin_fill", "lend"}:
            table.begin_fill(slot, lent=name == "lend")
            filling[slot] = LENT if name == "lend" else FILLING
            contents.pop(slot, None)
        elif name == "publish" and slot not in filling:
            before = bytes(memory)
            with pytest.raises(ValueError, match="without begin_fill"):
                table.publish(slot, key)
            assert bytes(memory) == before
            continue
        elif name == "publish":
            table.publish(slot, key)
            del filling[slot]
            contents[slot] = key
        else:
            table.clear(slot)
            filling.pop(slot, None)
            contents.pop(slot, None)
        generation, state, key_len, _, _, length, _, found = ENTRY.unpack_from(memory, at)
        assert generation > generations[slot]
        assert generation % 2 == (slot in filling)
        assert generation == table.generation(slot)
        generations[slot] = generation
        expected = contents.get(slot, b"")
        assert state == filling.get(slot, RESIDENT if expected else FREE)
        if slot not in filling:
            assert (key_len, found, length) == (len(expected), expected.ljust(64, b"\0"), 4096 if expected else 0)
    # A table that comes to the same memory later goes on counting.
    again = RegionTable(region, memoryview(memory))
    assert [again.generation(slot) for slot in range(4)] == generations


class Made(NamedTuple):
    """A table of three slots over memory of its own, and where the bytes of the slots lie."""

    memory: bytearray
    table: RegionTable

    @classmethod
    def fresh(cls) -> "Made":
        region = region_of(3, PAGE_BYTES)
        memory = bytearray(region.offset + region.data_bytes)
        return cls(memory, RegionTable(region, memoryview(memory)))

    def write(self, slot: int, number: int) -> None:
        """Put the bytes of a page into a slot, in two steps."""
        region, content = self.table.region, payload(key_of(number), PAGE_BYTES)
        at = region.offset + slot * region.component.slot_bytes
        self.memory[at : at + PAGE_BYTES // 2] = content[: PAGE_BYTES // 2]
        self.memory[at + PAGE_BYTES // 2 : at + PAGE_BYTES] = content[PAGE_BYTES // 2 :]

    def holds(self, memory: bytes, page: AdoptedPage) -> bool:
        """Say whether the bytes in the slot of a recovered page are its own."""
        at = self.table.region.offset + page.slot * self.table.region.component.slot_bytes
        return memory[at : at + PAGE_BYTES] == payload(page.key, PAGE_BYTES)


def test_an_entry_changes_only_under_an_odd_generation() -> None:
    made = Made.fresh()
    table = made.table

    def change() -> None:
        for number in range(2):
            table.begin_fill(0)
            table.publish(0, key_of(number), number, dirty=True)
            table.set_clean(0)
        table.clear(0)
        for lent in (False, True):
            table.begin_fill(0, lent)
            table.clear(0)

    seen = moments(made.memory, change)
    assert len(seen) > 50
    start = table.region.table_offset
    for before, after in pairwise(memory[start : start + SLOT_ENTRY_BYTES] for memory in seen):
        generations = int.from_bytes(before[:8], "little"), int.from_bytes(after[:8], "little")
        assert generations[0] <= generations[1]
        if before[8:10] + before[16:] != after[8:10] + after[16:]:
            assert generations[1] % 2 == 1
        elif before[10:16] != after[10:16] and generations[1] % 2 == 0:
            assert before[10:12] + after[10:12] == b"\1\0\0\0"  # clean now, with its checksum in the same store


def test_whenever_the_service_dies_every_whole_page_and_no_other_is_recovered() -> None:
    """The life of three slots, cut off at each of its moments; each page comes back with what is known of it."""
    made = Made.fresh()
    table = made.table
    resident: dict[int, AdoptedPage] = {}
    lent: set[int] = set()
    cuts = 0

    def live(slot: int, what: str, number: int = 0) -> None:
        nonlocal cuts
        before, lent_before = dict(resident), set(lent)
        match what:
            case "lend":
                resident.pop(slot, None)
                seen = moments(made.memory, lambda: table.begin_fill(slot, lent=True))
                lent.add(slot)
            case "engine writes":
                seen = moments(made.memory, lambda: made.write(slot, number), __file__)
            case "fill":
                seen = moments(made.memory, lambda: table.begin_fill(slot))
                seen += moments(made.memory, lambda: made.write(slot, number), __file__)
            case "publish":
                seen = moments(made.memory, lambda: table.publish(slot, key_of(number), number, dirty=number % 2 == 1))
                lent.discard(slot)
                resident[slot] = AdoptedPage(slot, key_of(number), number, number % 2 == 1)
            case "clean":
                seen = moments(made.memory, lambda: table.set_clean(slot))
                resident[slot] = AdoptedPage(slot, key_of(number), number, False)
            case _:
                seen = moments(made.memory, lambda: table.clear(slot))
                resident.pop(slot, None)
                lent.discard(slot)
        for memory in seen:
            again = bytearray(memory)
            second = RegionTable(table.region, memoryview(again))
            generations = [second.generation(slot) for slot in range(3)]
            assert second.is_plausible()
            pages, dropped, still_lent = second.recover()
            # What an engine may write to is known at every moment: only the step that lends or takes back may differ.
            assert lent_before & lent <= set(still_lent) <= lent_before | lent
            assert pages in ([before[slot] for slot in sorted(before)], [resident[slot] for slot in sorted(resident)])
            assert all(made.holds(memory, page) for page in pages)
            kept = {page.slot for page in pages}
            for slot in range(3):
                entry = ENTRY.unpack_from(again, table.region.table_offset + slot * SLOT_ENTRY_BYTES)
                moved = entry[0] - generations[slot]
                if slot in still_lent:
                    assert (moved, entry[0] % 2, entry[1]) == (0, 1, LENT)
                    continue
                assert entry[0] % 2 == 0
                assert moved == 0 if slot in kept else moved >= 0
                assert entry[1] == (RESIDENT if slot in kept else FREE)
                # Who saw it in use finds out that it no longer is.
                assert moved > 0 or slot in kept or memory[table.region.table_offset + slot * SLOT_ENTRY_BYTES + 8] == 0
            assert dropped <= 3 - len(pages) - len(still_lent)
            # What was mended stays so, and what was lent too.
            assert RegionTable(table.region, memoryview(again)).recover() == (pages, 0, still_lent)
            cuts += 1

    for slot, number in ((0, 1), (1, 2), (2, 3)):
        live(slot, "fill", number)
        live(slot, "publish", number)
    live(0, "clean", 1)
    live(1, "clear")
    live(1, "fill", 4)
    live(1, "clear")  # a read that failed
    live(2, "clear")
    live(2, "fill", 5)
    live(2, "publish", 5)
    live(1, "fill", 6)
    live(1, "publish", 6)
    live(2, "clean", 5)
    live(0, "clear")
    live(0, "lend")
    live(0, "engine writes", 7)
    live(0, "publish", 7)
    live(0, "clean", 7)
    live(1, "clear")
    live(1, "lend")
    live(1, "engine writes", 8)
    live(1, "clear")  # the engine gave it back
    live(1, "lend")
    live(1, "engine writes", 10)
    live(1, "publish", 10)
    assert cuts > 250


@given(st.integers(0, SLOT_ENTRY_BYTES - 1), st.integers(1, 255), st.booleans())
def test_a_scribbled_entry_is_dropped(at: int, change: int, dirty: bool) -> None:
    made = Made.fresh()
    for slot in range(2):
        made.table.begin_fill(slot)
        made.write(slot, slot)
        made.table.publish(slot, key_of(slot), 70 + slot, dirty)
    made.memory[made.table.region.table_offset + at] ^= change
    table = RegionTable(made.table.region, memoryview(made.memory))
    if at == 7 and change >> 6:
        assert not table.is_plausible()
        return
    pages, dropped, lent = table.recover()
    second = AdoptedPage(1, key_of(1), 71, dirty)
    if at == 8 and change == RESIDENT ^ LENT:
        assert lent == []  # its generation is even
    if (at == 0 and change % 2) or 8 <= at < 28 or 32 <= at < 64:
        assert (pages, dropped) == ([second], 1)
    else:
        # The generation may be any even number, and nothing is said by what is reserved or behind the key.
        assert (pages, dropped) == ([AdoptedPage(0, key_of(0), 70, dirty), second], 0)


def test_a_page_that_two_slots_claim_is_recovered_once() -> None:
    made = Made.fresh()
    made.table.begin_fill(0)
    made.write(0, 1)
    made.write(1, 1)
    made.table.publish(0, key_of(1))
    start = made.table.region.table_offset
    made.memory[start + SLOT_ENTRY_BYTES : start + 2 * SLOT_ENTRY_BYTES] = made.memory[start : start + SLOT_ENTRY_BYTES]
    table = RegionTable(made.table.region, memoryview(made.memory))
    assert table.recover() == Recovered([AdoptedPage(0, key_of(1), 0, False)], 1, [])
    assert table.generation(1) == 4


def test_only_a_resident_page_can_become_clean() -> None:
    made = Made.fresh()
    made.table.begin_fill(0)
    for slot in (0, 1):
        with pytest.raises(ValueError, match="holds no page"):
            made.table.set_clean(slot)
    made.table.publish(0, key_of(0), dirty=True)
    made.table.clear(0)
    with pytest.raises(ValueError, match="holds no page"):
        made.table.set_clean(0)


@pytest.mark.parametrize("key", [b"", b"x" * 65])
def test_a_key_that_does_not_fit_is_refused(key: bytes) -> None:
    region = region_of(1)
    table = RegionTable(region, memoryview(bytearray(1 << 20)))
    table.begin_fill(0)
    with pytest.raises(ValueError, match="key of"):
        table.publish(0, key)
    assert table.generation(0) == 1
