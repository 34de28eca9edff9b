"""The tokens that are taken, exchanged as a whole while the service runs.

Law: every look compares what was sent with every token, by digests of one length under a key of this process, so that
the time it takes says nothing about any of them; the tokens themselves are not kept.
"""

import hashlib
import hmac
import os
from collections.abc import Iterable

from forestage.core.roles import Caller, Grant

__all__ = ["Keyring"]

_DIGEST_BYTES = 32


class Keyring:
    """Callers by token. Without any token everybody may do everything."""

    def __init__(self, grants: Iterable[Grant] = ()) -> None:
        self._key = os.urandom(_DIGEST_BYTES)
        self._callers: tuple[tuple[bytes, Caller], ...] = ()
        self.replace(grants)

    @property
    def is_open(self) -> bool:
        """Whether no token is wanted."""
        return not self._callers

    def replace(self, grants: Iterable[Grant]) -> None:
        """Take these tokens from now on, and no other."""
        self._callers = tuple((self._digest(grant.secret.encode()), grant.caller) for grant in grants)

    def caller(self, authorization: str) -> Caller | None:
        """Return who sends this `Authorization` header, None if it names no token that is taken now."""
        if self.is_open:
            return Caller()
        scheme, _, secret = authorization.encode("latin-1").partition(b" ")
        given = self._digest(secret.strip())
        found: Caller | None = None
        for digest, caller in self._callers:
            if hmac.compare_digest(given, digest):
                found = caller
        return found if scheme.lower() == b"bearer" else None

    def _digest(self, secret: bytes) -> bytes:
        return hashlib.blake2b(secret, key=self._key, digest_size=_DIGEST_BYTES).digest()
