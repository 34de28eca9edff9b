"""The prefixes that an engine has asked about lately, so that a read of some of their pages knows where they may end.

Law: each chain is kept whole, under its keys in order; at most `capacity` are kept, and the latest asked for is found
first.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Chain", "Chains", "Stretch"]


@dataclass(frozen=True, slots=True)
class Chain:
    """A prefix as the service described it: `boundaries` in pages from its first key, ascending, 0 left out.

    `free_pages` is how many the engine had room for without eviction when it asked.
    """

    keys: tuple[str, ...]
    boundaries: tuple[int, ...]
    free_pages: int
    index: dict[str, int]

    def position(self, keys: Sequence[str]) -> int | None:
        """Return at which page of this chain `keys` begin, None when they are not a part of it."""
        start = self.index.get(keys[0])
        if start is None or self.keys[start : start + len(keys)] != tuple(keys):
            return None
        return start


@dataclass(frozen=True, slots=True)
class Stretch:
    """What to ask the service for when an engine reads some pages.

    `keys` begin where the engine's do. Of the engine's, the first `usable` are worth reading. `cut_at` is the length in
    pages of the chain to which the engine has cut it, None when it has not. `made_room`: it reads more than was free.
    """

    keys: Sequence[str]
    usable: int
    cut_at: int | None = None
    made_room: bool = False


class Chains:
    """Remembers the last `capacity` prefixes. For several threads: a reader sees a chain whole or not at all."""

    def __init__(self, capacity: int = 64) -> None:
        self._chains: deque[Chain] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._chains)

    def remember(self, keys: Sequence[str], boundaries: Sequence[int], free_pages: int) -> None:
        """Keep a prefix in place of the oldest one."""
        index = {key: page for page, key in enumerate(keys)}
        self._chains.appendleft(Chain(tuple(keys), tuple(boundaries), free_pages, index))

    def forget(self) -> None:
        """Drop all of them."""
        self._chains.clear()

    def stretch(self, keys: Sequence[str], *, may_go_on: bool) -> Stretch:
        """Say what to ask for so that the pages `keys` of a model with tail components come.

        Such pages come only up to a boundary: ask up to the next one behind them, if the engine may go on to it, else
        no farther than to the last one within. Of an unknown chain they are asked for as they are.
        """
        for chain in tuple(self._chains):
            start = chain.position(keys)
            if start is not None:
                break
        else:
            return Stretch(keys, len(keys))
        end = start + len(keys)
        behind = next((length for length in chain.boundaries if length >= end), None)
        if behind == end or (behind is not None and may_go_on):
            return Stretch(chain.keys[start:behind], len(keys), made_room=end > chain.free_pages)
        within = max((length for length in chain.boundaries if start < length < end), default=start)
        return Stretch(keys[: within - start], within - start, end if behind is not None else None)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the law at the top of this file holds."""
        assert self._chains.maxlen is not None
        assert len(self._chains) <= self._chains.maxlen
        for chain in self._chains:
            assert len(chain.index) == len(set(chain.keys))
            assert list(chain.boundaries) == sorted(set(chain.boundaries))
            assert all(0 < length <= len(chain.keys) for length in chain.boundaries)
