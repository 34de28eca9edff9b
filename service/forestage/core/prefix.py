"""The arithmetic of one prefix: what each page is to a job, which lengths are boundaries.

All lengths are pages from page 0. A boundary is a length p at which every tail component is there for its window
[max(device_pages, p - window), p); `device_pages` is always one (CONTRACT section 1).
"""

from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate, compress

from forestage.core.layout import ModelLayout

__all__ = ["PageStatus", "PrefixMap", "needed_pages"]


class PageStatus(IntEnum):
    """What one page of one component is to a job that asks for it, from worst to best."""

    ABSENT = 0
    STORED = 1  # in L3: wants a slot and a read
    LOADING = 2  # another job's read is under way: wants neither
    IDLE = 3  # resident and held by nobody: holding it takes it from what can be evicted
    HELD = 4  # resident and held by somebody


_THERE = bytes([0] + [1] * 255)
_RESIDENT = bytes([0, 0, 0] + [1] * 253)
_MISSING = bytes([1, 1, 1] + [0] * 253)
_COST = bytes([0, 1, 0, 1] + [0] * 252)


def _sums(status: bytearray, table: bytes) -> list[int]:
    return list(accumulate(status.translate(table), initial=0))


def needed_pages(layout: ModelLayout, device_pages: int, length: int) -> list[range]:
    """Return the pages of each component that a prefix of `length` needs in the pool."""
    return [
        range(max(device_pages, length - component.window) if component.is_tail else device_pages, length)
        for component in layout.components
    ]


class PrefixMap:
    """What every page of a prefix is, per component in the model's order; pages below `device_pages` do not count.

    `status[c][i]` is the PageStatus of page i. A snapshot: valid until anything becomes resident, held or evicted.
    """

    def __init__(self, layout: ModelLayout, device_pages: int, status: Sequence[bytearray]) -> None:
        self.layout = layout
        self.device_pages = device_pages
        self.status = status
        self.requested = len(status[0])
        # Running sums make every window and every length a subtraction.
        self._there = {c: _sums(status[c], _THERE) for c in layout.tails}
        self._resident = {c: _sums(status[c], _RESIDENT) for c in layout.tails}
        self._cost = [_sums(one, _COST) for one in status]

    def window(self, component_index: int, length: int) -> range:
        """Pages of a tail component that a prefix of `length` needs."""
        window = self.layout.components[component_index].window
        return range(max(self.device_pages, length - window), length)

    def ranges(self, length: int) -> list[range]:
        """Pages of each component that a prefix of `length` needs in the pool."""
        return needed_pages(self.layout, self.device_pages, length)

    def resident_pages(self, component_index: int, pages: range) -> list[int]:
        """Return which of `pages` are resident."""
        resident = self.status[component_index].translate(_RESIDENT)
        return list(compress(pages, resident[pages.start : pages.stop]))

    def missing_pages(self, component_index: int, pages: range) -> list[int]:
        """Return which of `pages` are not resident."""
        missing = self.status[component_index].translate(_MISSING)
        return list(compress(pages, missing[pages.start : pages.stop]))

    def reach(self, *, resident: bool = False) -> int:
        """Return the longest prefix whose every_page components are all there (or all resident)."""
        table = _RESIDENT if resident else _THERE
        reach = self.requested
        for c in self.layout.every_page:
            gap = self.status[c].translate(table).find(0, self.device_pages)
            if gap >= 0:
                reach = min(reach, gap)
        return reach

    def known_pages(self) -> bytes:
        """Return 1 for each page whose every_page components are all there, 0 for the others."""
        masks = [self.status[c].translate(_THERE) for c in self.layout.every_page]
        return bytes(map(min, zip(*masks, strict=True))) if len(masks) > 1 else bytes(masks[0])

    def is_boundary(self, length: int, *, resident: bool = False) -> bool:
        """Say whether every tail component is there (or resident) for its window ending at `length`."""
        for c, counts in (self._resident if resident else self._there).items():
            window = self.window(c, length)
            if counts[window.stop] - counts[window.start] != len(window):
                return False
        return True

    def boundaries(self, limit: int) -> list[int]:
        """Return every boundary above `device_pages` and at most `limit`, ascending. Linear in the pages."""
        return [length for length in range(self.device_pages + 1, limit + 1) if self.is_boundary(length)]

    def cost(self, component_index: int, length: int) -> int:
        """Slots of a component that a grant of `length` takes from what is free or evictable."""
        sums = self._cost[component_index]
        if self.layout.components[component_index].is_tail:
            window = self.window(component_index, length)
            return sums[window.stop] - sums[window.start]
        return sums[length] - sums[self.device_pages]

    def joint_cost(self, component_index: int, length: int, kept: int) -> int:
        """Slots of a tail component that the windows of two lengths take together."""
        window, other = self.window(component_index, length), self.window(component_index, kept)
        sums = self._cost[component_index]
        both = sums[window.stop] - sums[window.start] + sums[other.stop] - sums[other.start]
        start, stop = max(window.start, other.start), min(window.stop, other.stop)
        return both - (sums[stop] - sums[start]) if start < stop else both

    def costs(self, component_index: int) -> Sequence[int]:
        """Running sums of cost by length, for every_page components; subtract the one at `device_pages`."""
        return self._cost[component_index]

    def largest_boundary(self, limit: int, *, resident: bool = False) -> int:
        """Return the largest boundary at most `limit`; never less than `device_pages`."""
        if self.layout.tails:
            for length in range(limit, self.device_pages, -1):
                if self.is_boundary(length, resident=resident):
                    return length
            return self.device_pages
        return max(limit, self.device_pages)
