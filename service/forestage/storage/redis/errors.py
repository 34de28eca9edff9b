"""What can go wrong on a connection, as the threads that use it see it.

Law: after a LinkError the connection is not in step with the server any more and must be closed; after a ReplyError
it is, and every later reply belongs to its command.
"""

import errno

from forestage.core.errors import StorageUnavailableError

__all__ = ["AbandonedError", "DesyncError", "LinkError", "OversizeError", "QuietError", "ReplyError"]


class LinkError(StorageUnavailableError):
    """The connection could not be made, or is of no use any more."""


class QuietError(LinkError):
    """No byte came or went for as long as anybody was ready to wait."""


class AbandonedError(LinkError):
    """Nobody wants the rest of the reply that is under way."""


class DesyncError(LinkError):
    """What came is no reply to what was asked."""


class OversizeError(LinkError):
    """A value came that is too long to be read to its end."""


_ERRNO = {"OOM": errno.ENOSPC, "NOPERM": errno.EACCES, "NOAUTH": errno.EACCES}
_DOWN = frozenset({"LOADING", "MASTERDOWN", "CLUSTERDOWN", "READONLY", "BUSY"})
_REDIRECTS = frozenset({"MOVED", "ASK", "TRYAGAIN", "READONLY"})


class ReplyError(Exception):
    """The server answered a command with an error; `code` is its first word, as in `WRONGTYPE Operation against`."""

    def __init__(self, line: bytes) -> None:
        self.text = line.decode("ascii", "replace")
        super().__init__(self.text)
        self.code = self.text.partition(" ")[0]

    @property
    def is_redirect(self) -> bool:
        """True when another node, or the same one a moment later, would have answered."""
        return self.code in _REDIRECTS

    @property
    def wants_a_pause(self) -> bool:
        """True when it takes a moment until a repetition makes sense."""
        return self.code == "TRYAGAIN"

    def as_write_error(self) -> OSError | StorageUnavailableError:
        """Return what a write that was answered so raises."""
        if self.code in _DOWN:
            return StorageUnavailableError(self.text)
        return OSError(_ERRNO.get(self.code, errno.EIO), self.text)
