"""How long a write may take before it counts as hung, whatever the storage behind it does.

Law: a write is waited for as long as its storage would take at `_LEAST_BYTES_PER_S` for it and all that began before it
and are not overdue, and the stall timeout beside; so every write has its end known from its beginning.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forestage.core.errors import StorageUnavailableError

__all__ = ["WriteTime"]

# A storage that is slower than that is of no use to an engine, and large pages on slow disks are still written.
_LEAST_BYTES_PER_S = 1 << 20


class WriteTime:
    """The writes under way, and what each of them may take."""

    def __init__(self, stall_timeout_s: float) -> None:
        """Begin without writes.

        Args:
            stall_timeout_s: what a write of no bytes may take.
        """
        self._stall_timeout_s = stall_timeout_s
        self._under_way: dict[object, tuple[int, float]] = {}  # bytes, and when each is overdue

    @asynccontextmanager
    async def limit(self, what: str, num_bytes: int) -> AsyncIterator[None]:
        """Cancel the body when a write of so many bytes takes too long; raise StorageUnavailableError once it ended.

        A body that must not be left while a thread uses its buffers decides for itself when it ends.
        """
        now = asyncio.get_running_loop().time()
        ahead = sum(ahead_bytes for ahead_bytes, overdue in self._under_way.values() if overdue > now)
        allowed_s = self._stall_timeout_s + (ahead + num_bytes) / _LEAST_BYTES_PER_S
        me = object()
        self._under_way[me] = num_bytes, now + allowed_s
        try:
            async with asyncio.timeout(allowed_s) as timer:
                yield
        except TimeoutError as error:
            if not timer.expired():  # the system's own ETIMEDOUT
                raise
            raise StorageUnavailableError(f"{what} took more than {allowed_s:.1f} s") from error
        finally:
            del self._under_way[me]
