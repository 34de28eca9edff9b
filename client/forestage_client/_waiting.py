"""Awaiting a job by long polls, against one deadline."""

import time
from math import ceil

from forestage_client._calls import Call, get_prefetch
from forestage_client._errors import DeadlineExceeded
from forestage_client._types import Prefetch

__all__ = ["Waiting"]

POLL_MS = 20_000  # short enough that a dead peer is noticed, long enough to cost nothing


class Waiting:
    """The polls that await one job for `timeout_s` seconds from now."""

    def __init__(self, request_id: str, timeout_s: float) -> None:
        self._request_id = request_id
        self._timeout_s = timeout_s
        self._ends = time.monotonic() + timeout_s

    def next_poll(self, last: Prefetch | None = None) -> Call[Prefetch]:
        """Return the next poll after `last`; raises DeadlineExceeded when no time is left for one."""
        left_ms = max(0, ceil((self._ends - time.monotonic()) * 1000))
        if last is not None and left_ms == 0:
            raise DeadlineExceeded(f"job {self._request_id} is still {last.state} after {self._timeout_s:g} s")
        return get_prefetch(self._request_id, min(left_ms, POLL_MS))
