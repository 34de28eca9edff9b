"""Tenants: who asks, as a small number, and what share of the pool each is promised and may take.

Law: number 0 is `default`, which everybody shares whose name is not configured; names never go further than this
file, the engine counts with numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["DEFAULT_TENANT", "MAX_TENANTS", "TenantShare", "Tenants"]

DEFAULT_TENANT = "default"
MAX_TENANTS = 64  # configured ones: each makes every choice of a victim a little longer


@dataclass(frozen=True, slots=True)
class TenantShare:
    """Fractions of each component's slots: what others cannot take from a tenant, and what it cannot exceed."""

    name: str
    min_share: float = 0.0
    max_share: float = 1.0

    def minimum(self, whole: int) -> int:
        """Return how many of `whole` are promised, rounded down; all minima together fit."""
        return int(whole * Fraction(repr(self.min_share)))

    def maximum(self, whole: int) -> int:
        """Return how many of `whole` may be taken: at least one, or nothing could ever be brought."""
        return max(1, int(whole * Fraction(repr(self.max_share))))


class Tenants:
    """Numbers of the configured tenants. `shares` is by number, and empty when none is configured."""

    def __init__(self, configured: Sequence[TenantShare] = ()) -> None:
        named = {share.name: share for share in configured}
        default = named.pop(DEFAULT_TENANT, TenantShare(DEFAULT_TENANT))
        self.shares: tuple[TenantShare, ...] = (default, *named.values()) if configured else ()
        self._numbers = {share.name: number for number, share in enumerate(self.shares)}

    def number(self, name: str) -> int:
        """Return the number of a tenant; that of `default` for a name that is not configured."""
        return self._numbers.get(name, 0)
