"""Which pages of one component lie in the pool, and where: the slot table turned around, without asking the service.

Law: a key leads to a slot whose entry named it, resident, at a moment when its generation stood still. That was then:
whoever goes there takes a `PoolView.stamp`, which says whether it is so now.
"""

import numpy as np

from forestage_client._pool_format import ENTRY_BYTES, RESIDENT
from forestage_client.pool_view import PoolView

__all__ = ["ResidentPages"]

_ENTRIES = np.dtype(
    {
        "names": ["generation", "state", "key_len", "key"],
        "formats": ["<u8", "u1", "u1", "V64"],
        "offsets": [0, 8, 9, 32],
        "itemsize": ENTRY_BYTES,
    }
)
# Odd, and never reached: an entry that is noted so is looked at again.
_UNKNOWN = np.uint64(2**64 - 1)


class ResidentPages:
    """The keys that are resident, as of the last `refresh`. One thread refreshes; any may ask."""

    def __init__(self, view: PoolView, model: str, component: str) -> None:
        """Look at nothing yet. Raises KeyError for a component that the pool does not have."""
        self._table = np.frombuffer(view.table(model, component), dtype=_ENTRIES)
        self._seen = np.full(len(self._table), _UNKNOWN)
        self._slots: dict[bytes, int] = {}
        self._keys: list[bytes | None] = [None] * len(self._table)

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, key: bytes) -> int | None:
        """Return the slot in which a page was at the last refresh."""
        return self._slots.get(key)

    def refresh(self) -> int:
        """Take in the entries that have changed; return how many. Costs what changed, and one look at each generation.

        No fence is needed off x86 either: what is read in a wrong order here is found out by the stamp.
        """
        generations = self._table["generation"]
        now = generations.copy()
        changed = np.flatnonzero(now != self._seen)
        if not len(changed):
            return 0
        entries = self._table[changed]
        stood_still = (now[changed] == entries["generation"]) & (generations[changed] == now[changed])
        self._seen[changed] = np.where(stood_still, now[changed], _UNKNOWN)
        resident = stood_still & (now[changed] % 2 == 0) & (entries["state"] == RESIDENT)
        # First all that went, then all that came: a page may have moved from a later slot to an earlier one.
        for slot in changed.tolist():
            key = self._keys[slot]
            if key is not None:
                self._keys[slot] = None
                if self._slots.get(key) == slot:
                    del self._slots[key]
        keys = entries["key"][resident].tolist()
        lengths = entries["key_len"][resident].tolist()
        for slot, padded, length in zip(changed[resident].tolist(), keys, lengths, strict=True):
            key = padded[:length]
            self._keys[slot] = key
            self._slots[key] = slot
        return len(changed)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each key leads to the slot that is noted to have it."""
        for key, slot in self._slots.items():
            assert self._keys[slot] == key
        assert len(self._slots) <= sum(key is not None for key in self._keys)
