"""Slots: every transition is checked, and the counts are those of the states."""

import random
from collections.abc import Callable

import pytest

from forestage.core.slots import Slots, SlotState

MOVES: list[tuple[Callable[[Slots, int], None], SlotState, SlotState]] = [
    (Slots.begin, SlotState.RESERVED, SlotState.FILLING),
    (Slots.unbegin, SlotState.FILLING, SlotState.RESERVED),
    (Slots.publish, SlotState.FILLING, SlotState.RESIDENT),
    (Slots.give_back, SlotState.RESERVED, SlotState.FREE),
    (Slots.give_back, SlotState.FILLING, SlotState.FREE),
    (Slots.give_back, SlotState.RESIDENT, SlotState.FREE),
]


def _slot_in(state: SlotState) -> tuple[Slots, int]:
    slots = Slots(2)
    slot = slots.take(1)[0]
    if state is SlotState.FREE:
        slots.give_back(slot)
    if state >= SlotState.FILLING:
        slots.begin(slot)
    if state is SlotState.RESIDENT:
        slots.publish(slot)
    assert slots.state(slot) is state
    return slots, slot


@pytest.mark.parametrize("state", SlotState)
@pytest.mark.parametrize("move", [Slots.begin, Slots.unbegin, Slots.publish, Slots.give_back])
def test_only_the_moves_of_the_table_are_possible(move: Callable[[Slots, int], None], state: SlotState) -> None:
    slots, slot = _slot_in(state)
    allowed = [after for known, before, after in MOVES if (known, before) == (move, state)]
    if allowed:
        move(slots, slot)
        assert slots.state(slot) is allowed[0]
    else:
        with pytest.raises(RuntimeError):
            move(slots, slot)
        assert slots.state(slot) is state
    slots.check_integrity()


def test_all_slots_can_be_taken_once() -> None:
    slots = Slots(5)
    assert sorted(slots.take(1)[0] for _ in range(5)) == list(range(5))
    assert (slots.free, slots.reserved) == (0, 5)
    with pytest.raises(RuntimeError):
        slots.take(1)[0]


def test_slots_can_be_adopted_as_they_were() -> None:
    slots = Slots(5)
    slots.adopt([3, 0])
    assert (slots.free, slots.resident) == (3, 2)
    assert sorted(slots.take(1)[0] for _ in range(3)) == [1, 2, 4]
    with pytest.raises(RuntimeError):
        slots.adopt([1])
    slots.check_integrity()


def test_counts_follow_random_moves() -> None:
    rng = random.Random(1)
    slots = Slots(20)
    states = [SlotState.FREE] * 20
    for _ in range(5000):
        if rng.random() < 0.3 and slots.free:
            states[slots.take(1)[0]] = SlotState.RESERVED
        else:
            slot = rng.randrange(20)
            moves = [(move, after) for move, before, after in MOVES if before is states[slot]]
            if moves:
                move, states[slot] = rng.choice(moves)
                move(slots, slot)
        counts = [slots.free, slots.reserved, slots.filling, slots.resident]
        assert counts == [states.count(state) for state in SlotState]
    slots.check_integrity()


def test_a_miscount_is_noticed() -> None:
    slots = Slots(3)
    slots.take(1)[0]
    slots._count[0] += 1
    with pytest.raises(RuntimeError, match="recounted"):
        slots.check_integrity()
