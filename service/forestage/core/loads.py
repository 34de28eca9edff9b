"""One page of one component on its way from L3 into a slot, wanted by any number of jobs."""

from dataclasses import dataclass
from typing import Protocol

from forestage.core.job import Job

__all__ = ["Load", "Stoppable"]


class Stoppable(Protocol):
    """The read behind a load that is filling; a read that has not begun when `stopped` is set ends untouched."""

    stopped: bool


@dataclass(slots=True, eq=False)
class Load:
    """A slot being filled. It lives as long as somebody subscribes or a storage may write to it.

    `page` is its place in the prefix (equal keys mean equal prefixes, so it is the same for all subscribers). The
    budget of `owner` carries it; `reader` is who owned it when its read began, and counts it as loaded.
    """

    component: int
    key: bytes
    page: int
    slot: int
    owner: Job
    subscribers: list[Job]
    reader: Job | None = None
    filling: bool = False
    stalled: bool = False  # given up by everybody, or its page came otherwise; a storage may still write to the slot
    read: Stoppable | None = None
    drained_for: tuple[Job, ...] = ()  # settling jobs that gave it up and could use its slot
