"""The map of slots: it counts what the pool counts, exactly while it can, and costs the same whatever the capacity."""

from hypothesis import given
from hypothesis import strategies as st

from forestage.core.model_pool import ModelPool
from forestage.core.pool_map import LOOKS, SLOT_STATES, draw_map, slot_counts
from support.engine_driver import EngineDriver, SlotLog, chain, kv_model


def test_every_state_is_where_it_is() -> None:
    driver = EngineDriver(kv_model(), [10])
    old, new = chain("old", 3), chain("new", 4)
    driver.store([*old, *new])
    driver.submit(old, "old")
    driver.answer_probes()
    driver.begin_all_reads()
    for key in old:
        driver.end_read(driver.flight(key))
    driver.submit(old[:1])
    driver.engine.leases.release(next(iter(driver.engine.leases)).id)  # of three pages; one stays leased
    driver.submit(new)
    driver.answer_probes()
    driver.begin_reads()
    write = driver.engine.begin_write("m", chain("w", 2), {}, None, driver.now)
    driver.engine.commit_write(write.id, driver.now)
    counts = slot_counts(driver.pool, 0)
    assert counts == {"free": 1, "resident": 2, "leased": 1, "loading": 4, "dirty": 2}
    drawn = draw_map(driver.pool, 0, 10)
    assert (drawn.cell_slots, drawn.exact) == (1, True)
    words = [SLOT_STATES[cell.index(1)] for cell in drawn.cells]
    assert words == ["leased", "resident", "resident", *["loading"] * 4, "dirty", "dirty", "free"]


@given(st.integers(1, 5000), st.integers(1, 64))
def test_cells_cover_every_slot_once(capacity: int, max_cells: int) -> None:
    pool = ModelPool(kv_model(), [capacity], [SlotLog(capacity)])
    drawn = draw_map(pool, 0, max_cells)
    assert len(drawn.cells) <= max_cells
    assert drawn.exact == (drawn.cell_slots <= LOOKS)
    looked_at = sum(map(sum, drawn.cells))
    if drawn.exact:
        assert looked_at == capacity
        assert sum(cell[0] for cell in drawn.cells) == slot_counts(pool, 0)["free"]
    assert all(0 < sum(cell) <= LOOKS for cell in drawn.cells)


def test_a_cell_of_many_slots_is_an_even_sample() -> None:
    capacity = 64 * LOOKS * 10
    pool = ModelPool(kv_model(), [capacity], [SlotLog(capacity)])
    pool.adopt(0, [(slot, b"%016d" % slot) for slot in range(capacity // 4)])
    drawn = draw_map(pool, 0, 64)
    assert not drawn.exact
    assert {sum(cell) for cell in drawn.cells} == {LOOKS}
    assert [cell[1] / LOOKS for cell in drawn.cells] == [1.0] * 16 + [0.0] * 48
