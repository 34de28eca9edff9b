"""Exit codes that scripts can rely on."""

from enum import IntEnum

__all__ = ["Exit"]


class Exit(IntEnum):
    OK = 0
    FAILED = 1  # no service or storage there, or it refused
    USAGE = 2  # command line or configuration
    PARTIAL = 3  # prefetch: a part of the prefix is ready; status: storage is degraded; l3 verify: a page is bad
    MISS = 4  # prefetch: nothing beyond device_pages is ready
