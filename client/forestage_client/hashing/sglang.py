"""SGLang's page hashes: SHA-256 chains over token ids of 32 bits, little endian.

Follows the storage hash of SGLang 0.5.23, and of 0.5.13 with `old`.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256

from forestage_client.hashing.chain import PageHasher

__all__ = ["SglangHasher", "namespace_key"]

_NAMESPACE = b"sglang-cache-namespace-v1"
_MAX_NARROW = 2**32 - 1
_MAX_WIDE = 2**63 - 1
_WIDE = b"\xff"


def namespace_key(adapter_key: str | None, cache_salt: str | None) -> bytes:
    """Return what the first page of a namespace is chained to: nothing without adapter key and salt, else 32 bytes.

    An empty salt counts as none, an empty adapter key does not.
    """
    if adapter_key is None and not cache_salt:
        return b""
    digest = sha256(_NAMESPACE)
    for part in (adapter_key, cache_salt or None):
        if part is None:
            digest.update(b"\0")
        else:
            text = part.encode()
            digest.update(b"\1" + len(text).to_bytes(8, "little") + text)
    return digest.digest()


class SglangHasher(PageHasher):
    """The chain of one prompt, keys of 32 bytes.

    Args:
        page_tokens: SGLang's page size.
        extra_key: the request's extra key.
        cache_salt: the request's cache salt; an empty one counts as none.
        lora_id: the adapter, whose id SGLang appends to the extra key.
        bigram: whether the model runs with EAGLE, which hashes each token with the one after it.
        old: hash as 0.5.13: extra key, salt and adapter do not enter, and ids have at most 32 bits.
        prior: the key of the page before the first token; the namespace is in it already.
    """

    def __init__(
        self,
        page_tokens: int,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        lora_id: str | None = None,
        bigram: bool = False,
        old: bool = False,
        prior: bytes | None = None,
    ) -> None:
        adapter_key = extra_key if lora_id is None else (extra_key or "") + lora_id
        if prior is None:
            prior = b"" if old else namespace_key(adapter_key, cache_salt)
        super().__init__(page_tokens, prior)
        self.overlap = int(bigram)
        self._old = old

    def _hash_pages(self, prior: bytes, tokens: Sequence[int], first_page: int) -> list[bytes]:
        try:
            packed = self._packed(tokens, "I")
        except OverflowError:
            self._check(tokens)
            return self._hash_wide_pages(prior, tokens)
        step = len(packed) * self.page_tokens // (len(tokens) - self.overlap)
        keys = []
        for at in range(0, len(packed), step):
            prior = sha256(prior + packed[at : at + step]).digest()
            keys.append(prior)
        return keys

    def _hash_wide_pages(self, prior: bytes, tokens: Sequence[int]) -> list[bytes]:
        keys = []
        for at in range(0, len(tokens) - self.overlap, self.page_tokens):
            page = tokens[at : at + self.page_tokens + self.overlap]
            packed = _WIDE + self._packed(page, "Q") if max(page) > _MAX_NARROW else self._packed(page, "I")
            prior = sha256(prior + packed).digest()
            keys.append(prior)
        return keys

    def _packed(self, tokens: Sequence[int], typecode: str) -> bytes:
        words = array(typecode, tokens)
        if self.overlap:
            pairs = array(typecode, bytes(2 * words.itemsize * (len(words) - 1)))
            pairs[0::2], pairs[1::2] = words[:-1], words[1:]
            words = pairs
        if sys.byteorder == "big":
            words.byteswap()
        return words.tobytes()

    def _check(self, tokens: Sequence[int]) -> None:
        limit = _MAX_NARROW if self._old else _MAX_WIDE
        if len(tokens) and not (min(tokens) >= 0 and max(tokens) <= limit):
            raise ValueError(f"token ids must be 0 to {limit}")
        array("Q", tokens)  # a TypeError for what is no integer
