"""Many slots looked at in one go: which of them held the pages that were asked for, and which still do.

Law: as for one slot. A page is answered for only when its slot's generation was even and the same before its entry was
read and after its bytes were used, with the slot resident and its key equal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forestage_client._pool_format import ENTRY, ENTRY_BYTES, GENERATION, RESIDENT, RegionInfo

__all__ = ["SlotStamps", "still_held", "take_stamps"]


@dataclass(frozen=True, slots=True)
class SlotStamps:
    """What some slots of one region held. `generations[i]` is None where `slots[i]` did not hold the page asked for."""

    region: RegionInfo
    slots: tuple[int, ...]
    generations: tuple[int | None, ...]

    def __len__(self) -> int:
        return len(self.slots)


def take_stamps(
    memory: memoryview, region: RegionInfo, slots: Sequence[int], keys: Sequence[bytes], fence: Callable[[], None]
) -> SlotStamps:
    """Look at all of `slots`, in half a microsecond each. Raises IndexError for a negative one.

    `fence` keeps the loads before it from being done after those behind it.
    """
    if len(slots) != len(keys):
        raise ValueError(f"{len(keys)} keys, but {len(slots)} slots")
    if slots and min(slots) < 0:
        raise IndexError(f"slot {min(slots)} is negative")
    table, last = region.table_offset, region.slots - 1
    # One past the end is what a slot number of another instance of the pool looks like: no entry to look at.
    places = [table + min(slot, last) * ENTRY_BYTES for slot in slots]
    first, entry, payload_bytes = GENERATION.unpack_from, ENTRY.unpack_from, region.payload_bytes
    before = [first(memory, at)[0] for at in places]
    fence()
    generations: list[int | None] = []
    for generation, at, slot, wanted in zip(before, places, slots, keys, strict=True):
        again, state, key_len, _, _, length, _, key = entry(memory, at)
        is_there = (
            again == generation
            and not generation & 1
            and state == RESIDENT
            and key[:key_len] == wanted
            and length == payload_bytes
            and slot <= last
        )
        generations.append(generation if is_there else None)
    return SlotStamps(region, tuple(slots), tuple(generations))


def still_held(memory: memoryview, stamps: SlotStamps, fence: Callable[[], None]) -> list[bool]:
    """Say of each slot whether it has held its page from the stamp until now."""
    fence()
    table, last, generation = stamps.region.table_offset, stamps.region.slots - 1, GENERATION.unpack_from
    now = [generation(memory, table + min(slot, last) * ENTRY_BYTES)[0] for slot in stamps.slots]
    return [before == after for before, after in zip(stamps.generations, now, strict=True)]
