"""The slot tables of the pool file in binary form (docs/pool-format.md).

Law of a slot entry: its generation only grows; it is odd from before the first byte of the slot may be written until
the content is stable, and even otherwise; each refill and each eviction changes it. While it is even and the state is
RESIDENT, the slot holds the whole bytes of the key in the entry. From before another process may learn that it can
write to a slot until the owner knows that it no longer does, the state is LENT and the generation odd. This holds after
every single store, hence also when the process is killed between two of them.
"""

import struct
import zlib
from typing import NamedTuple

from forestage.core.geometry import SLOT_ENTRY_BYTES, Region
from forestage.pool.fence import STORES_IN_ORDER, fence

__all__ = ["FILLING", "FREE", "LENT", "RESIDENT", "AdoptedPage", "Recovered", "RegionTable"]

# Slot states. LENT is filling by another process, which goes on when this one is killed.
FREE, FILLING, RESIDENT, LENT = 0, 1, 2, 3

_DIRTY = 1  # of the flags
_MAX_KEY_BYTES = 64
_MAX_GENERATION = 1 << 62

_ENTRY_WORDS = SLOT_ENTRY_BYTES // 8
_STATE_OFFSET = 8
# state, key_len, flags, checksum, length, page, key; behind the generation.
_CONTENT = struct.Struct("<BBHIQI4x64s")
_CONTENT_END = _STATE_OFFSET + _CONTENT.size
_ENTRY = struct.Struct(f"<QBBHIQI4x64s{SLOT_ENTRY_BYTES - _CONTENT_END}x")
_EMPTY = bytes(_CONTENT.size)

assert _ENTRY.size == SLOT_ENTRY_BYTES


def _seeds(flags: int, length: int) -> tuple[int, ...]:
    """Return, by key_len, the CRC-32 of what a resident entry holds besides checksum, page and key."""
    return tuple(
        zlib.crc32(struct.pack("<BBHQ", RESIDENT, key_len, flags, length)) for key_len in range(_MAX_KEY_BYTES + 1)
    )


class AdoptedPage(NamedTuple):
    """A page that an earlier life of the service left whole in a slot.

    `page` is its index in its prefix, 0 if unknown; `dirty` says that it had not been written to L3.
    """

    slot: int
    key: bytes
    page: int
    dirty: bool


class Recovered(NamedTuple):
    """What an earlier life of the service left in a region.

    `pages` in order of their slots; `dropped` counts the slots that were freed; `lent` are those that another process
    may still be writing to: neither resident nor free.
    """

    pages: list[AdoptedPage]
    dropped: int
    lent: list[int]


class RegionTable:
    """The slot entries of one region. Called on the event loop, by one owner; each call is a few stores.

    `memory` is the whole mapped pool file. Once `release` was called no other method may be.
    """

    __slots__ = ("_entries", "_generations", "_length", "_seeds", "_words", "region")

    def __init__(self, region: Region, memory: memoryview) -> None:
        self.region = region
        self._entries = memory[region.table_offset : region.table_offset + region.slots * SLOT_ENTRY_BYTES]
        self._words = self._entries.cast("Q")
        self._length = region.component.shards * region.component.bytes
        self._seeds = (_seeds(0, self._length), _seeds(_DIRTY, self._length))
        self._generations: list[int] = self._words[::_ENTRY_WORDS].tolist()

    def begin_fill(self, slot: int, lent: bool = False) -> None:
        """Announce that the bytes of the slot are about to change: readers that come now or are copying find out.

        `lent` says that another process will write them, so that a later life of the service, after a kill, leaves the
        slot alone (`recover`); call this before that process learns of the slot. It ends with `publish` or `clear`.
        """
        # The next odd number, so that beginning again without an end still shows.
        generation = (self._generations[slot] + 1) | 1
        self._generations[slot] = generation
        self._words[slot * _ENTRY_WORDS] = generation
        self._entries[slot * SLOT_ENTRY_BYTES + _STATE_OFFSET] = LENT if lent else FILLING
        if not STORES_IN_ORDER:
            fence()

    def publish(self, slot: int, key: bytes, page: int = 0, dirty: bool = False) -> None:
        """Declare that the slot holds the whole bytes of `key` (1 to 64 bytes) and that nobody writes to it.

        `page` is the index of the page in its prefix, `dirty` says that L3 does not have it yet. Raises ValueError,
        and changes nothing, when no fill was begun or the key does not fit.
        """
        generation = self._generations[slot] + 1
        key_len = len(key)
        if generation & 1 or not 0 < key_len <= _MAX_KEY_BYTES:
            raise ValueError(f"publish of slot {slot} without begin_fill, or with a key of {key_len} bytes")
        flags = _DIRTY if dirty else 0
        checksum = zlib.crc32(key, self._seeds[flags][key_len]) ^ page
        at = slot * SLOT_ENTRY_BYTES + _STATE_OFFSET
        _CONTENT.pack_into(self._entries, at, RESIDENT, key_len, flags, checksum, self._length, page, key)
        if not STORES_IN_ORDER:
            fence()
        self._words[slot * _ENTRY_WORDS] = generation
        self._generations[slot] = generation

    def set_clean(self, slot: int) -> None:
        """Note that L3 has the page of a resident slot now. Its generation stays; raises ValueError if not resident."""
        at = slot * SLOT_ENTRY_BYTES + _STATE_OFFSET
        state, key_len, _, _, _, page, key = _CONTENT.unpack_from(self._entries, at)
        if self._generations[slot] & 1 or state != RESIDENT:
            raise ValueError(f"slot {slot} holds no page that could be clean")
        checksum = zlib.crc32(key[:key_len], self._seeds[0][key_len]) ^ page
        # Flags and checksum lie in one word, so that they change together.
        self._words[slot * _ENTRY_WORDS + 1] = RESIDENT | key_len << 8 | checksum << 32

    def clear(self, slot: int) -> None:
        """Make the slot free: its page was evicted, or its fill ended and is not wanted. Nobody writes to it.

        Of a lent slot that means: the other process has said so, or its time is up.
        """
        generation = (self._generations[slot] + 1) | 1
        at, words = slot * SLOT_ENTRY_BYTES, self._words
        words[slot * _ENTRY_WORDS] = generation
        if not STORES_IN_ORDER:
            fence()
        self._entries[at + _STATE_OFFSET : at + _CONTENT_END] = _EMPTY
        if not STORES_IN_ORDER:
            fence()
        words[slot * _ENTRY_WORDS] = generation + 1
        self._generations[slot] = generation + 1

    def generation(self, slot: int) -> int:
        """Return the generation of a slot as it stands in the table."""
        return self._generations[slot]

    def is_plausible(self) -> bool:
        """Say whether the generations can be those of a table: no service comes near their end."""
        return max(self._generations) < _MAX_GENERATION

    def recover(self) -> Recovered:
        """Keep the pages that an earlier life left whole and the slots that it had lent; free all others in use.

        A freed slot moves its generation on, so that a reader who saw it finds out. A lent one stays as it is, through
        any number of lives, until `clear`. Nobody but who was lent a slot may be writing to any.
        """
        kept: list[AdoptedPage] = []
        lent: list[int] = []
        seen: set[bytes] = set()
        dropped: list[int] = []
        wanted, seeds, crc32 = self._length, self._seeds, zlib.crc32
        for slot, entry in enumerate(_ENTRY.iter_unpack(self._entries)):
            generation, state, key_len, flags, checksum, length, page, padded = entry
            if not generation & 1:
                if state == FREE:
                    continue
                key = padded[:key_len]
                if (
                    state == RESIDENT
                    and length == wanted
                    and 0 < key_len <= _MAX_KEY_BYTES
                    and flags <= _DIRTY
                    and crc32(key, seeds[flags][key_len]) ^ page == checksum
                    and key not in seen
                ):
                    seen.add(key)
                    kept.append(AdoptedPage(slot, key, page, flags == _DIRTY))
                    continue
            elif state == LENT:
                lent.append(slot)
                continue
            dropped.append(slot)
        for slot in dropped:
            self.clear(slot)
        return Recovered(kept, len(dropped), lent)

    def release(self) -> None:
        """Let go of the mapped memory."""
        self._words.release()
        self._entries.release()
