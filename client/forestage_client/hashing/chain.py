"""A chain of page keys that grows with its prompt, whatever the scheme.

Law: `extend` called for the parts of a prompt gives, one after the other, the same keys as once for the whole; a call
that raises changes nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Self

__all__ = ["STEP_TOKENS", "PageHasher"]

#: Tokens that are worked on at a time: no single call into C then keeps other threads waiting for long.
STEP_TOKENS = 4096


class PageHasher(ABC):
    """The chain of one prompt. Its state is the last key and the tokens of the page that is not whole yet.

    It may be pickled, and copied where a conversation branches. Not for several threads at once.

    Args:
        page_tokens: tokens of a page, at least 1.
        prior: the key of the page before the first, to go on with a chain that was begun elsewhere.
    """

    #: Tokens of the next page that a page takes in beyond its own.
    overlap = 0

    def __init__(self, page_tokens: int, prior: bytes) -> None:
        if page_tokens < 1:
            raise ValueError("page_tokens must be at least 1")
        self.page_tokens = page_tokens
        self.num_pages = 0
        self._prior = prior
        self._rest: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far, those of the page that is not whole included."""
        return self.num_pages * self.page_tokens + len(self._rest)

    def copy(self) -> Self:
        """Return a chain that goes on from here by itself."""
        other = copy(self)
        other._rest = list(self._rest)  # noqa: SLF001  (of the same class)
        return other

    def extend(self, token_ids: Sequence[int]) -> list[bytes]:
        """Take the next tokens of the prompt, and return the keys of the pages that they make whole.

        Raises ValueError for a token id out of the scheme's range, TypeError for one that is no integer.
        """
        keys: list[bytes] = []
        prior, rest, taken = self._prior, self._rest, 0
        step = self.page_tokens * max(1, STEP_TOKENS // self.page_tokens)
        while taken < len(token_ids):
            after = taken + step + self.overlap - len(rest)
            tokens = [*rest, *token_ids[taken:after]] if rest else token_ids[taken:after]
            taken = after
            num_pages = max(0, len(tokens) - self.overlap) // self.page_tokens
            if num_pages:
                whole = num_pages * self.page_tokens + self.overlap
                keys += self._hash_pages(prior, tokens[:whole], self.num_pages + len(keys))
                prior = keys[-1]
            rest = list(tokens[num_pages * self.page_tokens :])
        self._check(rest)
        self._prior, self._rest = prior, rest
        self.num_pages += len(keys)
        return keys

    @abstractmethod
    def _hash_pages(self, prior: bytes, tokens: Sequence[int], first_page: int) -> list[bytes]:
        """Return the keys of the pages that `tokens` are; page numbers count from `first_page`."""

    @abstractmethod
    def _check(self, tokens: Sequence[int]) -> None:
        """Raise ValueError or TypeError if one of them is no token id."""
