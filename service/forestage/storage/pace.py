"""How large a batch of reads should be, learnt from how fast the last ones went.

Law: `batch_bytes` lies between `LEAST_BYTES` and `MOST_BYTES`.

A batch costs some 100 us of hand-over between threads, so it should be long; and whoever comes next waits for those
under way, so it should be short. On a page cache 2.5 ms are 8 MiB, on a slow network share a single page.
"""

__all__ = ["LEAST_BYTES", "MOST_BYTES", "Pace"]

BATCH_S = 0.0025
LEAST_BYTES = 64 << 10
MOST_BYTES = 8 << 20
_FIRST_BYTES = 2 << 20


class Pace:
    """The size of the next batch, in bytes."""

    def __init__(self) -> None:
        self.batch_bytes = _FIRST_BYTES

    def learn(self, num_bytes: int, seconds: float) -> None:
        """Take note of a batch. Goes half the way to what it tells and at most doubles, as one batch may be odd."""
        if num_bytes <= 0 or seconds <= 0:
            return
        wanted = min(num_bytes / seconds * BATCH_S, 3 * self.batch_bytes)
        self.batch_bytes = max(LEAST_BYTES, min(MOST_BYTES, int(self.batch_bytes + wanted) // 2))
