"""What a token allows, and whom it stands for.

Law: a role includes every lower one. It says what may be done; whose things it may be done to, the tenant says that a
token is bound to, if it is.
"""

from dataclasses import dataclass, field
from enum import IntEnum

__all__ = ["Caller", "Grant", "Role"]


class Role(IntEnum):
    """`READ` changes nothing, `WRITE` brings, holds and writes pages, `ADMIN` also lets go of what others may want."""

    READ = 1
    WRITE = 2
    ADMIN = 3

    @property
    def word(self) -> str:
        """The role as configuration and documents write it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: the role, and the tenant that it acts for; None if it may act for any."""

    role: Role = Role.ADMIN
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """A token and who sends it. The token stays out of `repr`."""

    secret: str = field(repr=False)
    caller: Caller = Caller()
