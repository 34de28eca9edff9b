"""The pages of one `read_into`, and how their values add up to outcomes.

Law: each page is reported once, in the order of the batch, and not before the last of its values has ended; from then
on nothing writes to its views.
"""

import threading
from collections.abc import Sequence

from forestage.storage.base import PageRead, ReadOutcome, Report
from forestage.storage.redis.names import ShardName

__all__ = ["Batch", "ValueRead"]

_LOADED, _STOPPED = ReadOutcome.LOADED, ReadOutcome.STOPPED


class ValueRead:
    """One value to be read: a shard of a page."""

    __slots__ = ("index", "page", "shard", "view")

    def __init__(self, index: int, page: PageRead, shard: ShardName, view: memoryview) -> None:
        self.index = index
        self.page = page
        self.shard = shard
        self.view = view

    def redis_name(self) -> bytes:
        """Return its key in Redis."""
        return self.shard.name_of(self.page.key)


class Batch:
    """Collects outcomes from any thread."""

    def __init__(self, reads: Sequence[PageRead], report: Report, names: Sequence[Sequence[ShardName]]) -> None:
        self.values = [
            ValueRead(index, page, shard, view)
            for index, page in enumerate(reads)
            for shard, view in zip(names[page.component_index], page.views, strict=True)
        ]
        self._report = report
        self._open = [len(page.views) for page in reads]
        self._outcomes = [_LOADED] * len(reads)
        self._next = 0
        self._lock = threading.Lock()

    def is_lost(self, value: ValueRead) -> bool:
        """True when nobody needs this value any more: its page is stopped, or another shard of it is not there."""
        return value.page.stopped or self._outcomes[value.index] is not _LOADED

    def end(self, value: ValueRead, outcome: ReadOutcome) -> None:
        """Take note that a value has ended; report every page that is due by that."""
        index = value.index
        with self._lock:
            # Of a page with several shards the first failure counts, and any failure more than being stopped.
            if outcome is not _LOADED and self._outcomes[index] in (_LOADED, _STOPPED):
                self._outcomes[index] = outcome
            self._open[index] -= 1
            if index == self._next:
                self._report_due()

    def end_rest(self, outcome: ReadOutcome) -> None:
        """End every page that has not ended; nothing may read any value of them any more."""
        with self._lock:
            for index, num_open in enumerate(self._open):
                if num_open:
                    self._open[index] = 0
                    if self._outcomes[index] is _LOADED:
                        self._outcomes[index] = outcome
            self._report_due()

    def _report_due(self) -> None:
        while self._next < len(self._open) and self._open[self._next] == 0:
            self._report(self._next, self._outcomes[self._next])
            self._next += 1
