"""The plan of a prefetch: how long, and why not longer. Pure arithmetic over a PrefixMap and the room there is.

Law: device_pages <= host <= stored <= requested and usable <= granted <= restorable <= stored (CONTRACT section 2).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from forestage.core.prefix import PrefixMap

__all__ = ["Plan", "make_plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Lengths in pages. `usable` is the largest boundary within the grant that needs no read."""

    requested: int
    host: int
    stored: int
    restorable: int
    granted: int
    usable: int
    keep_usable: bool  # there is room to keep the tail states of `usable` while the grant is read

    def worth_reading(self, min_pages: int) -> bool:
        """Say whether the gain over what is usable now is at least `min_pages` (and at least one)."""
        return self.granted - self.usable >= max(1, min_pages)


def make_plan(prefix: PrefixMap, room: Sequence[int]) -> Plan:
    """Cut a prefix to what fits at a boundary.

    `room[c]` is how many slots of component c may be taken: free ones and unheld resident ones, within the share
    that may be pinned. Resident pages of the prefix itself are counted in it and paid for by `PrefixMap.cost`,
    so a grant never counts on evicting its own pages or window.
    """
    layout, device_pages = prefix.layout, prefix.device_pages
    host = prefix.reach(resident=True)
    stored = prefix.reach()
    restorable = prefix.largest_boundary(stored)

    fit = restorable
    for c in layout.every_page:
        costs = prefix.costs(c)
        # costs rise with the length, so the last one within the room is the longest that fits
        fit = min(fit, bisect_right(costs, room[c] + costs[device_pages]) - 1)

    def fits(length: int) -> bool:
        return all(prefix.cost(c, length) <= room[c] for c in layout.tails)

    granted = prefix.largest_boundary(max(fit, device_pages))
    while granted > device_pages and not fits(granted):
        granted = prefix.largest_boundary(granted - 1)

    usable = prefix.largest_boundary(min(host, granted), resident=True)
    while usable > device_pages and not fits(usable):
        usable = prefix.largest_boundary(usable - 1, resident=True)

    keep_usable = all(prefix.joint_cost(c, granted, usable) <= room[c] for c in layout.tails)
    return Plan(prefix.requested, host, stored, restorable, granted, usable, keep_usable)
