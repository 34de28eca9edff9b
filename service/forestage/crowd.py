"""Who is connected, and who has to go when too many are.

Law: at most `max_connections + SPARE` are inside. Those that have no whole request under way wait, in the order in
which they began to. Beyond `max_connections` those that have waited longest go, unless they have only just come; who
comes beyond the spare places takes that of the one that has waited longest in any case. So neither idle, nor silent,
nor slow connections keep anybody out for long, and while all are being served, probes still are answered.
"""

from typing import Protocol

__all__ = ["FRESH_S", "SPARE", "Crowd", "Member"]

#: Connections beyond the limit, for probes: they get no answer to anything else.
SPARE = 64
#: So long nobody has to go who could still be about to ask.
FRESH_S = 0.5


class Member(Protocol):
    """A connection."""

    def dismiss(self) -> None:
        """Break off at once."""


class Crowd:
    """The connections of one service. Times are seconds of one monotonic clock."""

    def __init__(self, max_connections: int = 1024) -> None:
        self.max_connections = max_connections
        self._inside: set[Member] = set()
        self._waiting: dict[Member, float] = {}

    def __len__(self) -> int:
        return len(self._inside)

    def enter(self, member: Member, now: float) -> None:
        """Let a connection in, which waits at first; others may be dismissed for it, or itself if all are served."""
        self._inside.add(member)
        self._waiting[member] = now
        if not self.has_room(now) and len(self._inside) > self.max_connections + SPARE:
            self._dismiss_longest()

    def has_room(self, now: float) -> bool:
        """Say whether anything but probes is answered; dismisses whoever has waited long enough where that helps."""
        while len(self._inside) > self.max_connections:
            since = next(iter(self._waiting.values()), now)
            if now - since < FRESH_S:
                return False
            self._dismiss_longest()
        return True

    def serve(self, member: Member) -> None:
        """Note that a request of this connection is whole, and will be answered."""
        self._waiting.pop(member, None)

    def wait(self, member: Member, now: float) -> None:
        """Note that a connection has been answered; it waits from now on."""
        if member in self._inside:
            self._waiting.pop(member, None)
            self._waiting[member] = now

    def leave(self, member: Member) -> None:
        """Forget a connection that has ended. Idempotent."""
        self._inside.discard(member)
        self._waiting.pop(member, None)

    def _dismiss_longest(self) -> None:
        longest = next(iter(self._waiting))
        self.leave(longest)
        longest.dismiss()

    def check_integrity(self) -> None:
        """Raise with the numbers if the law is broken."""
        since = list(self._waiting.values())
        if len(self._inside) > self.max_connections + SPARE or not self._waiting.keys() <= self._inside:
            raise RuntimeError(f"{len(self._inside)} inside, {len(self._waiting)} wait, {self.max_connections} allowed")
        if since != sorted(since):
            raise RuntimeError("those that wait are not in order")
