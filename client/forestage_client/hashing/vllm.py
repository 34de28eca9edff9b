"""vLLM's block hashes: chains over canonical CBOR, SHA-256 or XXH3-128. Follows vLLM 0.33.0."""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Literal

from forestage_client.hashing.cbor import Plain, encode, encode_array_head, encode_bytes_head, encode_uints
from forestage_client.hashing.chain import PageHasher
from forestage_client.hashing.prompt import LoraAdapter, MmItem

__all__ = ["DEFAULT_SEED", "KEY_BYTES", "VllmAlgorithm", "VllmHasher", "none_hash"]

VllmAlgorithm = Literal["sha256_cbor", "xxhash_cbor"]

#: What takes the place of PYTHONHASHSEED where it is not set, for sha256_cbor; xxhash_cbor draws one by process then.
DEFAULT_SEED = "vllm-none-hash"
KEY_BYTES: Mapping[VllmAlgorithm, int] = {"sha256_cbor": 32, "xxhash_cbor": 16}
_MAX_TOKEN = 2**32 - 1
_NULL = encode(None)


def _sha256(data: bytes) -> bytes:
    return sha256(data).digest()


def _xxh3_128(data: bytes) -> bytes:
    from xxhash import xxh3_128_digest

    digest: bytes = xxh3_128_digest(data)
    return digest


_DIGESTS: Mapping[VllmAlgorithm, Callable[[bytes], bytes]] = {"sha256_cbor": _sha256, "xxhash_cbor": _xxh3_128}


def none_hash(algorithm: VllmAlgorithm, seed: str | None) -> bytes:
    """Return what the first block is chained to. `seed` is the PYTHONHASHSEED that vLLM runs with, None if unset.

    Raises ValueError for xxhash_cbor without a seed, whose hashes no other process can know, and ModuleNotFoundError
    where the package xxhash is missing.
    """
    if seed is None:
        if algorithm == "xxhash_cbor":
            raise ValueError("xxhash_cbor needs the PYTHONHASHSEED that vLLM runs with: unset, its seed is random")
        seed = DEFAULT_SEED
    try:
        return _DIGESTS[algorithm](encode(seed))
    except ModuleNotFoundError as error:
        detail = 'xxhash_cbor needs the package xxhash: pip install "forestage[serve]"'
        raise ModuleNotFoundError(detail, name=error.name) from error


class VllmHasher(PageHasher):
    """The chain of one prompt, keys of 32 bytes with sha256_cbor and of 16 with xxhash_cbor.

    Args:
        page_tokens: tokens of a block, times those of decode context parallelism.
        algorithm: vLLM's `--prefix-caching-hash-algo`.
        seed: the PYTHONHASHSEED that vLLM runs with, None if it is unset.
        lora: the adapter of the request.
        cache_salt: the request's cache salt; an empty one counts as none.
        mm: multimodal items of the prompt in order; those of later turns are given to `extend`.
        prior: the hash of the block before the first token; a salt is in it already.
    """

    def __init__(
        self,
        page_tokens: int,
        *,
        algorithm: VllmAlgorithm = "sha256_cbor",
        seed: str | None = None,
        lora: LoraAdapter | None = None,
        cache_salt: str | None = None,
        mm: Iterable[MmItem] = (),
        prior: bytes | None = None,
    ) -> None:
        if prior is not None and len(prior) != KEY_BYTES[algorithm]:
            raise ValueError(f"a block hash has {KEY_BYTES[algorithm]} bytes")
        super().__init__(page_tokens, none_hash(algorithm, seed) if prior is None else prior)
        self._algorithm: VllmAlgorithm = algorithm
        self._lora: list[Plain] = [] if lora is None else [("lora", lora.name, lora.path)]
        self._salt: list[Plain] = [("cache_salt", cache_salt)] if cache_salt and prior is None else []
        self._items = tuple(mm)

    def extend(self, token_ids: Sequence[int], mm: Iterable[MmItem] = ()) -> list[bytes]:
        """Take the next tokens, and the items that begin in them; return the keys of the blocks that are whole now.

        Offsets of items count from the first token of the prompt. Raises ValueError for an item that begins in a
        block whose key is known, ValueError and TypeError for what is no token id.
        """
        before, added = self._items, tuple(mm)
        done = self.num_pages * self.page_tokens
        if any(item.offset < done for item in added):
            raise ValueError(f"an item begins before token {done}, up to which the keys are known")
        self._items = before + added
        try:
            keys = super().extend(token_ids)
        except BaseException:
            self._items = before
            raise
        done = self.num_pages * self.page_tokens
        self._items = tuple(item for item in self._items if item.end > done)
        return keys

    def _hash_pages(self, prior: bytes, tokens: Sequence[int], first_page: int) -> list[bytes]:
        ids = self._checked(tokens)
        digest, size = _DIGESTS[self._algorithm], self.page_tokens
        items_of = self._items_by_page(first_page, first_page + len(ids) // size)
        head = encode_array_head(3) + encode_bytes_head(len(prior))
        keys: list[bytes] = []
        for at in range(0, len(ids), size):
            page = first_page + len(keys)
            extra = [*self._lora, *items_of.get(page, ()), *(self._salt if page == 0 else ())]
            block = encode_uints(ids[at : at + size])
            prior = digest(head + prior + block + (encode(extra) if extra else _NULL))
            keys.append(prior)
        return keys

    def _items_by_page(self, first: int, last: int) -> dict[int, list[Plain]]:
        size = self.page_tokens
        found: dict[int, list[Plain]] = {}
        for item in self._items:
            for page in range(max(first, item.offset // size), min(last, -(-item.end // size))):
                found.setdefault(page, []).append(("mm", item.identifier, item.offset - page * size))
        return found

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        try:
            return array("I", tokens).tolist()
        except OverflowError:
            raise ValueError(f"token ids must be 0 to {_MAX_TOKEN}") from None

    def _check(self, tokens: Sequence[int]) -> None:
        self._checked(tokens)
