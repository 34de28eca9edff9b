"""Prefixes that somebody says will be asked for, until they are, or a time is over.

Law: every expectation that is alive has one want in its model's pool and one timer, and stands under its last page; the
pages of all of them are counted, and never more than `max_pages`; nor
are there more than `most` expectations.
"""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from forestage.core.errors import CapacityError
from forestage.core.model_pool import ModelPool
from forestage.core.timers import Timers
from forestage.core.wants import Want

__all__ = ["Expectation", "Expectations"]


@dataclass(slots=True, eq=False)
class Expectation:
    """A prefix (pages from `device_pages` on) that is expected until `expires_at`, seconds of the engine's clock."""

    id: str
    model: str
    want: Want
    expires_at: float
    tenant: int
    timer: int = 0

    @property
    def marked(self) -> int:
        """Pages that are evicted last for it now."""
        return self.want.taken


class Expectations:
    """Expectations by id and by their last page. `max_s` bounds how long one lives; ends are among the `timers`."""

    def __init__(
        self,
        pools: Mapping[str, ModelPool],
        max_s: float,
        timers: Timers[Callable[[float], None]],
        max_pages: int = 1 << 20,
        most: int = 65536,
    ) -> None:
        self._pools = pools
        self._max_s = max_s
        self._timers = timers
        self._max_pages = max_pages
        self._most = most
        self._pages = 0
        self._by_id: dict[str, Expectation] = {}
        self._by_end: dict[tuple[str, bytes], list[Expectation]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Expectation]:
        return iter(self._by_id.values())

    def add(self, model: str, keys: Sequence[bytes], ttl_s: float, now: float, tenant: int = 0) -> Expectation:
        """Expect a prefix of at least one page; raises CapacityError, with nothing taken, if too many pages are."""
        if self._pages + len(keys) > self._max_pages or len(self._by_id) >= self._most:
            expected = f"{len(self._by_id)} prefixes of {self._pages} pages"
            raise CapacityError(f"{expected} are expected already", retry_after_s=1.0)
        self._pages += len(keys)
        expires_at = now + min(ttl_s, self._max_s)
        want = self._pools[model].wants.add(tuple(keys))
        expectation = Expectation(uuid.uuid4().hex, model, want, expires_at, tenant)
        expectation.timer = self._timers.put(expires_at, partial(self._expire, expectation))
        self._by_id[expectation.id] = expectation
        self._by_end.setdefault((model, keys[-1]), []).append(expectation)
        return expectation

    def knows(self, expect_id: str, tenant: int | None = None) -> bool:
        """Say whether an expectation of this id is alive, and the tenant's where one is named."""
        expected = self._by_id.get(expect_id)
        return expected is not None and tenant in {None, expected.tenant}

    def drop(self, expect_id: str, tenant: int | None = None) -> None:
        """Expect a prefix no more, if it is the tenant's where one is named. Idempotent."""
        expected = self._by_id.get(expect_id)
        if expected is not None and tenant in {None, expected.tenant}:
            self._end(expected)

    def meet(self, model: str, keys: Sequence[bytes]) -> None:
        """A prefetch asks for `keys`: each prefix of it that was expected has come, of equal ones the oldest."""
        if self._by_end:
            for key in keys:
                waiting = self._by_end.get((model, key))
                if waiting:
                    self._end(waiting[0])

    def _expire(self, expected: Expectation, _now: float) -> None:
        self._end(expected)

    def _end(self, expected: Expectation) -> None:
        keys = expected.want.keys
        del self._by_id[expected.id]
        waiting = self._by_end[expected.model, keys[-1]]
        waiting.remove(expected)
        if not waiting:
            del self._by_end[expected.model, keys[-1]]
        self._pages -= len(keys)
        self._timers.take_back(expected.timer)
        self._pools[expected.model].wants.remove(expected.want)

    def check_integrity(self) -> None:
        """Recount pages and tables; raise with the numbers if the law is broken."""
        pages = sum(len(expected.want.keys) for expected in self._by_id.values())
        listed = sum(map(len, self._by_end.values()))
        if pages != self._pages or listed != len(self._by_id) or pages > self._max_pages:
            raise RuntimeError(
                f"{self._pages} pages expected, recounted {pages}; {listed} of {len(self._by_id)} listed"
            )
        if any(not expected.want.alive for expected in self._by_id.values()):
            raise RuntimeError("an expectation lives on without its want")
