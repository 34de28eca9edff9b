"""Dirty pages on their way from the pool to L3.

Law: a page is borrowed from the engine and given back exactly once, however its storage call ends: returned, raised,
late or cancelled (begun or not); until then its slot stays dirty and held, since the storage may still be reading it.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from forestage.core.engine import Engine
from forestage.core.errors import StorageUnavailableError
from forestage.core.write import PageWrite
from forestage.prefetch.reads import SlotMemory
from forestage.storage.base import Storage

__all__ = ["WriteBehind"]

log = logging.getLogger("forestage.writes")

# One at a time, reads or not: a read that comes finds at most one write under way, which takes half of what L3 can do
# from it at most. A second one would gain a sixth where L3 is near, and might make a small read wait for both.
_AT_ONCE = 1
# Reads go first, but writes must not wait for ever: beside reads there is none after each for as long as it took, at
# most so many seconds. Where both share what L3 can do, that leaves reads three quarters of it and more.
_LONGEST_REST_S = 1.0
_MOST_LATE = 4  # calls that hang; with more of them the storage is left alone


class WriteBehind:
    """Keeps a write going while there are dirty pages. `on_progress` is called on the loop after each change."""

    def __init__(
        self,
        engine: Engine,
        memory: SlotMemory,
        region_of: Callable[[str, int], int],
        storage: Storage,
        clock: Callable[[], float],
        on_progress: Callable[[], None],
        attempt_s: float,
    ) -> None:
        """Write nothing yet; `attempt_s` seconds after its begin an attempt to store a page has failed."""
        self._engine = engine
        self._memory = memory
        self._region_of = region_of
        self._storage = storage
        self._clock = clock
        self._on_progress = on_progress
        self._attempt_s = attempt_s
        self._calls: dict[PageWrite, float] = {}
        self._late: set[PageWrite] = set()
        self._is_failing = False
        self._is_reading = False
        self._rest_until = 0.0
        self._rest: asyncio.TimerHandle | None = None

    @property
    def in_flight(self) -> int:
        """Calls of the storage that have not returned, late ones among them."""
        return len(self._calls)

    def start(self, tasks: asyncio.TaskGroup, *, reading: bool) -> None:
        """Hand dirty pages to the storage while it may have more; `reading` says that reads are under way.

        Calls that are late do not count, until there are too many: a few that hang must not keep all others waiting.
        """
        self._is_reading = reading
        if self._is_resting():
            return
        while len(self._calls) - len(self._late) < _AT_ONCE and len(self._late) < _MOST_LATE:
            one = self._engine.writes.next_page()
            if one is None:
                return
            self._calls[one] = self._clock()
            task = tasks.create_task(self._write(one))
            # A task that is cancelled before its first step never comes to its own clean-up.
            task.add_done_callback(partial(self._end, one, False))

    def close(self) -> None:
        """Wake nobody any more."""
        if self._rest is not None:
            self._rest.cancel()

    def _is_resting(self) -> bool:
        """Say whether reads have L3 to themselves now; if so, see to it that somebody looks again."""
        left = self._rest_until - self._clock()
        if not self._is_reading or left <= 0:
            return False
        if self._rest is None:
            self._rest = asyncio.get_running_loop().call_later(left, self._rest_ended)
        return True

    def _rest_ended(self) -> None:
        self._rest = None
        self._on_progress()

    async def _write(self, one: PageWrite) -> None:
        layout, stored = one.write.layout, False
        late = asyncio.get_running_loop().call_later(self._attempt_s, self._be_late, one)
        try:
            views = self._memory.shard_views(self._region_of(layout.name, one.component), one.slot)
            # Being late only asks the storage to stop: it returns when it has let go of the slot.
            async with asyncio.timeout(self._attempt_s):
                await self._storage.write(layout, one.component, one.key, views)
            stored = True
        except (StorageUnavailableError, OSError) as error:  # TimeoutError is an OSError
            self._note_failure(error)
        except Exception:
            log.exception("a storage raised in an unexpected way; the page counts as not stored")
        finally:
            late.cancel()
            self._end(one, stored)

    def _be_late(self, one: PageWrite) -> None:
        self._late.add(one)
        self._on_progress()

    def _end(self, one: PageWrite, stored: bool, *_: object) -> None:
        """Give a page back to the engine. Idempotent."""
        if one not in self._calls:
            return
        now = self._clock()
        begun = self._calls.pop(one)
        self._late.discard(one)
        if self._is_reading:
            self._rest_until = now + min(now - begun, _LONGEST_REST_S)
        if stored:
            self._engine.writes.stored(one, now)
            if self._is_failing:
                self._is_failing = False
                log.info("storage %s takes pages again", self._storage.kind)
        else:
            self._engine.writes.not_stored(one, now)
        self._on_progress()

    def _note_failure(self, error: Exception) -> None:
        if not self._is_failing:  # once an outage, not once a page
            self._is_failing = True
            log.warning("storage %s does not take a page: %s", self._storage.kind, str(error) or "too late")
