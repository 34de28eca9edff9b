"""What the slots of a component are used for: in numbers, and as a map of bounded size.

Law: the counts add up to the capacity; so do those of the cells as long as every slot is looked at, which holds up to
`max_cells * LOOKS` slots.
"""

from dataclasses import dataclass

from forestage.core.model_pool import ModelPool

__all__ = ["LOOKS", "SLOT_STATES", "PoolMap", "draw_map", "slot_counts"]

#: What a slot may be used for, in the words of the metric `pool_slots`.
SLOT_STATES = ("free", "resident", "leased", "loading", "dirty")

#: Slots that are looked at for one cell: it bounds the time of a map, and is more than a screen can tell apart.
LOOKS = 32


@dataclass(frozen=True, slots=True)
class PoolMap:
    """Runs of `cell_slots` slots each, the last perhaps shorter; each cell counts states as SLOT_STATES orders them.

    `exact` says that every slot was looked at; otherwise a cell is what an even sample of its slots is.
    """

    cell_slots: int
    exact: bool
    cells: tuple[tuple[int, ...], ...]


def slot_counts(pool: ModelPool, component: int) -> dict[str, int]:
    """Count the slots of a component by state. O(1)."""
    slots, index, dirty = pool.slots[component], pool.index[component], pool.dirty(component)
    return {
        "free": slots.free,
        "resident": index.evictable,
        "leased": index.held - dirty,  # every dirty page is held
        "loading": slots.reserved + slots.filling,
        "dirty": dirty,
    }


def draw_map(pool: ModelPool, component: int, max_cells: int) -> PoolMap:
    """Draw the slots of a component in order. O(max_cells * LOOKS), whatever the capacity."""
    capacity = pool.slots[component].capacity
    cell_slots = -(-capacity // max_cells)
    step = -(-cell_slots // LOOKS)
    cells = tuple(
        pool.count_states(component, range(first, min(first + cell_slots, capacity), step))
        for first in range(0, capacity, cell_slots)
    )
    return PoolMap(cell_slots, step == 1, cells)
