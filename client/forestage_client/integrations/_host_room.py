"""How long a prefix an engine has room for, as far as a storage backend can tell.

SGLang asks what is stored, then makes room, and where that does not suffice cuts what it was told to whatever there is,
which for a model with states is a length at which nothing can be resumed, and all is lost. A storage that names no
longer prefix than fits saves it. But only SGLang knows what can be evicted, so a limit that is too low loses pages too.
"""

from collections.abc import Sequence
from typing import Literal, get_args

__all__ = ["HostRoom", "RoomRule"]

#: "auto": see `HostRoom.limit`; "free": only what is free, right where nothing can be evicted; "ignore": no limit.
RoomRule = Literal["auto", "free", "ignore"]

_CUT_COUNTS_S = 2.0
_EVICTION_COUNTS_S = 60.0


class HostRoom:
    """What is known of the room in an engine's host pool, in pages. For several threads: each fact is one value."""

    def __init__(self, rule: RoomRule) -> None:
        if rule not in get_args(RoomRule):
            raise ValueError(f"host_room must be one of {', '.join(get_args(RoomRule))}, not {rule!r}")
        self._rule = rule
        self._cut: tuple[float, int] | None = None  # when, and to how many pages
        self._evicted_s: float | None = None

    def was_cut(self, pages: int, now: float) -> None:
        """Note that the engine, with all it could evict, had room for so many pages."""
        self._cut = (now, pages)

    def was_made(self, now: float) -> None:
        """Note that the engine read more than was free when it asked: it can evict."""
        self._evicted_s = now

    def limit(self, free_pages: int, boundaries: Sequence[int], now: float) -> int | None:
        """Return how long a prefix may be, None for as long as it is. `boundaries` ascend and are not empty.

        By "auto" these cases, in this order: 1. all of it is free; 2. the engine has just cut another prefix, so there
        is no more than that; 3. it has made room lately and can do so again; 4. what is free is worth at least half of
        all, and certain; 5. it is not.
        """
        if self._rule == "ignore" or boundaries[-1] <= free_pages:
            return None
        if self._rule == "free":
            return free_pages
        if self._cut is not None and now - self._cut[0] <= _CUT_COUNTS_S:
            return max(self._cut[1], free_pages)
        if self._evicted_s is not None and now - self._evicted_s <= _EVICTION_COUNTS_S:
            return None
        certain = max((length for length in boundaries if length <= free_pages), default=0)
        return free_pages if 2 * certain >= boundaries[-1] else None
