"""What happened when to one job.

Law: the moments are in the order of time; `arrived` is the first one and `done`, once it is there, the last. However
often a job is cut, it keeps at most MAX_CUTS cuts: the first ones, and how many more there were.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

__all__ = ["MAX_CUTS", "Event", "Moment", "Timeline"]

#: Each failing page may cut a job anew; what explains its end are the first cuts.
MAX_CUTS = 16


class Event(StrEnum):
    """In the order in which they follow each other at one and the same moment."""

    ARRIVED = "arrived"
    ADMITTED = "admitted"
    PROBE = "probe"
    GRANT = "grant"
    FIRST_PAGE = "first_page"
    LAST_PAGE = "last_page"
    CUT = "cut"
    SETTLE = "settle"
    DONE = "done"


_RANK = {event: rank for rank, event in enumerate(Event)}


class Moment(NamedTuple):
    """`at`: seconds of the engine's clock. `pages`: the length that it is about. `reason`: why, if there is one."""

    at: float
    event: Event
    pages: int
    reason: str | None = None


@dataclass(slots=True)
class Timeline:
    """Moments of a job, noted by the engine. `reserved` is when all slots of its grant were reserved, if measured."""

    noted: list[Moment] = field(default_factory=list)
    first_page: Moment | None = None
    last_page: Moment | None = None
    num_cuts: int = 0
    reserved: float | None = None

    def note(self, at: float, event: Event, pages: int, reason: str | None = None) -> None:
        self.noted.append(Moment(at, event, pages, reason))

    def note_pages(self, at: float, length: int) -> None:
        """Pages came, and the prefix is whole up to `length` now. Only the first and the last time are kept."""
        if self.first_page is None:
            self.first_page = Moment(at, Event.FIRST_PAGE, length)
        self.last_page = Moment(at, Event.LAST_PAGE, length)

    def note_cut(self, at: float, length: int, reason: str) -> None:
        """The grant ends at `length`; the same cut said again is no other one."""
        last = self.noted[-1] if self.noted else None
        if last is not None and (last.event, last.pages, last.reason) == (Event.CUT, length, reason):
            return
        self.num_cuts += 1
        if self.num_cuts <= MAX_CUTS:
            self.note(at, Event.CUT, length, reason)

    def first(self, event: Event) -> Moment | None:
        """Return the first moment of a kind that was noted; pages are kept apart."""
        return next((moment for moment in self.noted if moment.event is event), None)

    def moments(self) -> list[Moment]:
        """Return everything that has happened so far, in order."""
        pages = [moment for moment in (self.first_page, self.last_page) if moment is not None]
        return sorted([*self.noted, *pages], key=lambda moment: (moment.at, _RANK[moment.event]))

    def check_integrity(self) -> None:
        """Raise RuntimeError if the moments break the law."""
        moments = self.moments()
        events = [moment.event for moment in moments]
        if events[:1] != [Event.ARRIVED] or events.count(Event.ARRIVED) != 1:
            raise RuntimeError(f"a timeline that does not begin by arriving once: {events}")
        if Event.DONE in events[:-1] or events.count(Event.CUT) != min(self.num_cuts, MAX_CUTS):
            raise RuntimeError(f"a timeline goes on after the end, or lost a cut: {events}, {self.num_cuts} cuts")
        if any(later.at < earlier.at for earlier, later in zip(self.noted, self.noted[1:], strict=False)):
            raise RuntimeError(f"moments were noted out of order: {moments}")
