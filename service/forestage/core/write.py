"""One reservation of slots by an engine that writes pages, and what becomes of those pages.

Law: a slot of a write is either in `slots` (the engine may write to it) or in `held` (its page is resident); of the
pages that were committed, each is waiting, durable or failed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from forestage.core.layout import ModelLayout

__all__ = ["PageWrite", "Write", "WriteReason", "WriteResult", "WriteSettings", "WriteState"]


class WriteReason(StrEnum):
    """Why a write got fewer slots than it asked for."""

    HOST_CAPACITY = "host_capacity"  # the pool is too small, or too much of it is in use
    BACK_PRESSURE = "back_pressure"  # L3 is slower than the writers


class WriteState(StrEnum):
    OPEN = "open"
    COMMITTED = "committed"
    EXPIRED = "expired"  # nobody can commit it any more, though its slots may not be back yet


class WriteResult(StrEnum):
    """What became of a page that somebody asked to write."""

    STORED = "stored"  # it needed no slot: resident or in L3 already
    REFUSED = "refused"  # no slot for it, see WriteReason
    DROPPED = "dropped"  # the writer gave its slots back
    EXPIRED = "expired"  # the writer never said that it is there
    DUPLICATE = "duplicate"  # it had become resident otherwise before it was committed
    DURABLE = "durable"  # L3 has it
    LOST = "lost"  # L3 did not take it in as many attempts as there may be


@dataclass(frozen=True, slots=True)
class WriteSettings:
    """Limits of writing; times in seconds.

    `max_dirty_fraction` of a component's slots may be lent or dirty at once. `margin_s` after its end the slots of a
    write that expired are used again: its engine may be late. The n-th failed attempt to store a page is followed by
    the next one after `retry_s * retry_growth ** (n - 1)`, at most `retry_cap_s`. At most
    `max_writes` are known at once.
    """

    max_dirty_fraction: float = 0.5
    expire_s: float = 30.0
    margin_s: float = 5.0
    keep_done_s: float = 60.0
    max_attempts: int = 5
    retry_s: float = 1.0
    retry_growth: float = 3.0
    retry_cap_s: float = 60.0
    max_writes: int = 2**24

    def retry_after_s(self, attempts: int) -> float:
        """Return how long a page waits that was not stored in so many attempts."""
        # Bounded before the power is taken, which has no bound.
        return min(self.retry_cap_s, self.retry_s * self.retry_growth ** min(attempts - 1, 64))


@dataclass(slots=True, eq=False)
class Write:
    """One reservation. Only `Writes` changes it.

    `tails[c]` are the pages, as asked, that carry a state of tail component c; `stored` those that need nothing.
    Pages from `granted` on got no slots, for `reason`. By component and page, `slots` are what the engine may fill
    until `expires_at`, and `held` what was committed and is not yet released. `waiting` says of how many components
    of a page L3 does not have it yet, `lost` for which pages one was given up.

    Of `num_parts` parts, those in `begun` were given to a process, and those in `there` are filled; 0 parts: it is one
    process's alone.
    """

    id: str
    layout: ModelLayout
    keys: Sequence[bytes]
    tails: Mapping[int, Sequence[int]]
    granted: int
    reason: WriteReason | None
    stored: tuple[int, ...]
    slots: list[dict[int, int]]
    expires_at: float
    tenant: int = 0  # whose it is
    state: WriteState = WriteState.OPEN
    committed: int = 0
    durable: int = 0
    failed: int = 0
    duplicate: int = 0
    held: list[dict[int, int]] = field(default_factory=list)
    waiting: dict[int, int] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    timer: int = 0
    request_id: str = ""
    num_parts: int = 0
    begun: set[int] = field(default_factory=set)
    there: set[int] = field(default_factory=set)

    @property
    def parts_left(self) -> int:
        """How many parts are still to be filled."""
        return self.num_parts - len(self.there)

    def id_of(self, part: int) -> str:
        """Return the id by which whoever fills a part knows this write."""
        return f"{self.id}.{part}" if self.num_parts else self.id

    @property
    def settled(self) -> bool:
        """Nothing will change any more: it has expired, or every committed page is durable or failed."""
        return self.state is WriteState.EXPIRED or (self.state is WriteState.COMMITTED and not self.waiting)

    @property
    def reserved(self) -> int:
        """Pages for which the engine has slots."""
        return len({page for slots in self.slots for page in slots})

    def slots_of(self, component: int) -> list[int | None]:
        """Return the slots of a component: one entry a page, or a tail index as asked; None where there is no slot."""
        pages = self.tails.get(component, ()) if self.layout.components[component].is_tail else range(len(self.keys))
        return [self.slots[component].get(page) for page in pages]


@dataclass(slots=True, eq=False)
class PageWrite:
    """One dirty page of one component on its way to L3."""

    write: Write
    component: int
    page: int
    key: bytes
    slot: int
    attempts: int = 0
