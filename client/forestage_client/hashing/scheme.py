"""How an engine names the pages of a model: the scheme and the settings of the engine that enter the keys."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from forestage_client.hashing.chain import PageHasher
from forestage_client.hashing.prompt import LoraAdapter, MmItem, Prompt
from forestage_client.hashing.sglang import SglangHasher
from forestage_client.hashing.vllm import KEY_BYTES, VllmAlgorithm, VllmHasher, none_hash

__all__ = ["SCHEME_NAMES", "HashScheme", "SchemeName"]

SchemeName = Literal["sglang", "sglang-old", "vllm-sha256-cbor", "vllm-xxhash-cbor"]
SCHEME_NAMES: tuple[SchemeName, ...] = get_args(SchemeName)

_VLLM: dict[str, VllmAlgorithm] = {"vllm-sha256-cbor": "sha256_cbor", "vllm-xxhash-cbor": "xxhash_cbor"}


@dataclass(frozen=True, slots=True)
class HashScheme:
    """The scheme of one model.

    Args:
        name: `sglang` (0.5.23), `sglang-old` (0.5.13), `vllm-sha256-cbor` or `vllm-xxhash-cbor`.
        page_tokens: tokens of a page.
        seed: for vLLM, the PYTHONHASHSEED that it runs with; None if unset, which vllm-xxhash-cbor refuses.
        bigram: for SGLang, whether the model runs with EAGLE.

    Raises ValueError for settings that do not fit together, ModuleNotFoundError if vllm-xxhash-cbor lacks its package.
    """

    name: SchemeName
    page_tokens: int
    seed: str | None = None
    bigram: bool = False

    def __post_init__(self) -> None:
        if self.name not in SCHEME_NAMES:
            raise ValueError(f"the scheme must be one of {', '.join(SCHEME_NAMES)}")
        if self.page_tokens < 1:
            raise ValueError("page_tokens must be at least 1")
        if self.name in _VLLM:
            if self.bigram:
                raise ValueError("bigram belongs to SGLang's schemes")
            none_hash(_VLLM[self.name], self.seed)
        elif self.seed is not None:
            raise ValueError("a seed belongs to vLLM's schemes")

    @property
    def key_bytes(self) -> int:
        """The length of a page key."""
        return KEY_BYTES[_VLLM[self.name]] if self.name in _VLLM else 32

    def num_pages(self, num_tokens: int) -> int:
        """Return how many pages have a key: whole ones only."""
        return max(0, num_tokens - self.bigram) // self.page_tokens

    def hasher(
        self,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        lora: str | LoraAdapter | None = None,
        mm: Iterable[MmItem] = (),
    ) -> PageHasher:
        """Begin the chain of a prompt. Raises ValueError for what the scheme does not know."""
        if self.name in _VLLM:
            if extra_key is not None:
                raise ValueError("extra_key: only SGLang has one")
            if isinstance(lora, str):
                raise ValueError("lora: vLLM hashes the name and the path of an adapter")
            algorithm = _VLLM[self.name]
            return VllmHasher(
                self.page_tokens, algorithm=algorithm, seed=self.seed, lora=lora, cache_salt=cache_salt, mm=mm
            )
        if isinstance(lora, LoraAdapter):
            raise ValueError("lora: SGLang hashes the id of an adapter, one text")
        if tuple(mm):
            raise ValueError("mm: SGLang has multimodal items among the token ids")
        return SglangHasher(
            self.page_tokens,
            extra_key=extra_key,
            cache_salt=cache_salt,
            lora_id=lora,
            bigram=self.bigram,
            old=self.name == "sglang-old",
        )

    def keys_of(
        self,
        token_ids: Sequence[int],
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        lora: str | LoraAdapter | None = None,
        mm: Iterable[MmItem] = (),
    ) -> list[bytes]:
        """Return the keys of a whole prompt in one go; raises as `hasher` and `PageHasher.extend`."""
        return self.hasher(extra_key=extra_key, cache_salt=cache_salt, lora=lora, mm=mm).extend(token_ids)

    def keys_of_prompt(self, prompt: Prompt) -> list[bytes]:
        """Return the keys of a prompt as requests have it."""
        return self.keys_of(
            prompt.token_ids,
            extra_key=prompt.extra_key,
            cache_salt=prompt.cache_salt,
            lora=prompt.lora,
            mm=prompt.mm,
        )
