"""How many pages an engine has room for, as far as a storage backend can tell.

SGLang asks what is stored, then makes room, and where that does not suffice cuts what it was told to whatever there is,
which for a model with states is a length at which nothing can be resumed. So a storage that knows the room names no
longer prefix than fits.
"""

from typing import Literal, get_args

__all__ = ["HostRoom", "RoomRule"]

#: "learn": what the engine has cut a prefix to, for a while; "free": what is free when it asks, which is right where
#: nothing can be evicted; "ignore": no limit.
RoomRule = Literal["learn", "free", "ignore"]

_REMEMBER_S = 2.0


class HostRoom:
    """What is known of the room in an engine's host pool, in pages."""

    def __init__(self, rule: RoomRule) -> None:
        if rule not in get_args(RoomRule):
            raise ValueError(f"host_room must be one of {', '.join(get_args(RoomRule))}, not {rule!r}")
        self._rule = rule
        self._seen: tuple[float, int] | None = None  # when, and to how many pages

    def was_cut(self, pages: int, now: float) -> None:
        """Note that the engine, with all it could evict, had room for so many pages."""
        self._seen = (now, pages)

    def limit(self, free_pages: int, now: float) -> int | None:
        """Return how long a prefix may be, in pages, when so many are free; None when nothing is known against it."""
        if self._rule == "ignore":
            return None
        if self._rule == "free":
            return free_pages
        seen = self._seen
        if seen is None or now - seen[0] > _REMEMBER_S:
            return None
        return max(seen[1], free_pages)
