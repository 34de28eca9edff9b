"""What can go wrong on a connection, as the threads that use it see it.

Law: after a LinkError the connection is not in step with the server any more and must be closed; after a ReplyError
it is, and every later reply belongs to its command.
"""

from forestage.core.errors import StorageUnavailableError

__all__ = ["AbandonedError", "DesyncError", "LinkError", "OversizeError", "QuietError", "ReplyError"]


class LinkError(StorageUnavailableError):
    """The connection could not be made, or is of no use any more."""


class QuietError(LinkError):
    """No byte came or went for as long as anybody was ready to wait."""


_REDIRECTS = frozenset({"MOVED", "ASK", "TRYAGAIN"})


class AbandonedError(LinkError):
    """Nobody wants the rest of the reply that is under way."""


class DesyncError(LinkError):
    """What came is no reply to what was asked."""


class OversizeError(LinkError):
    """A value came that is too long to be read to its end."""


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
