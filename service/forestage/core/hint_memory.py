"""Envelopes of hints that were carried out, so that one that is sent again is answered instead of carried out again.

Law: the remembered envelopes have at most `max_actions` actions together, unless it is a single one; each is kept
`keep_s` seconds from when it was carried out, the oldest goes first, and none answers for another sender.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from forestage.core.errors import ConflictError

__all__ = ["HintMemory"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Envelope(Generic[T]):
    digest: bytes
    done: tuple[T, ...]
    until: float


class HintMemory(Generic[T]):
    """What was done for each envelope, by who sent it (None: nobody in particular) and by its message id."""

    def __init__(self, keep_s: float, max_actions: int = 4096) -> None:
        self._keep_s = keep_s
        self._max_actions = max_actions
        self._envelopes: dict[tuple[str | None, str], _Envelope[T]] = {}  # in order of `until`
        self._actions = 0

    def __len__(self) -> int:
        return len(self._envelopes)

    def find(self, sender: str | None, message_id: str, digest: bytes, now: float) -> tuple[T, ...] | None:
        """Return what was done for an envelope, None if it is new. An empty message id is always new.

        Raises ConflictError if the id was used for another content, whose digest differs.
        """
        self._forget_old(now)
        known = self._envelopes.get((sender, message_id)) if message_id else None
        if known is None:
            return None
        if known.digest != digest:
            raise ConflictError("this message_id was used for different hints", slug="message-id-conflict")
        return known.done

    def remember(self, sender: str | None, message_id: str, digest: bytes, done: tuple[T, ...], now: float) -> None:
        """Keep what was done for an envelope that `find` did not know."""
        if not message_id or self._keep_s <= 0:
            return
        self._envelopes[sender, message_id] = _Envelope(digest, done, now + self._keep_s)
        self._actions += len(done)
        while self._actions > self._max_actions and len(self._envelopes) > 1:
            self._forget_first()

    def _forget_old(self, now: float) -> None:
        while self._envelopes and next(iter(self._envelopes.values())).until <= now:
            self._forget_first()

    def _forget_first(self) -> None:
        oldest = self._envelopes.pop(next(iter(self._envelopes)))
        self._actions -= len(oldest.done)

    def check_integrity(self) -> None:
        """Recount the actions, and compare the order; raise with the numbers if the law is broken."""
        counted = sum(len(envelope.done) for envelope in self._envelopes.values())
        ends = [envelope.until for envelope in self._envelopes.values()]
        if counted != self._actions or ends != sorted(ends):
            raise RuntimeError(f"{self._actions} actions remembered, recounted {counted}, ends {ends}")
        if self._actions > self._max_actions and len(self._envelopes) > 1:
            raise RuntimeError(f"{self._actions} actions remembered, at most {self._max_actions}")
