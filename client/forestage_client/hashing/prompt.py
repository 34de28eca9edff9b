"""What determines the page keys of a prompt: its token ids, and what else the engine lets in."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LoraAdapter", "MmItem", "Prompt"]


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter as vLLM hashes it: the name and the path it was loaded with."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class MmItem:
    """A multimodal item of a prompt: `length` placeholder tokens from token `offset` on. For vLLM only."""

    identifier: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 1:
            raise ValueError("an item has an offset of at least 0 and a length of at least 1 token")

    @property
    def end(self) -> int:
        """The token after the last placeholder."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that takes the place of page keys in a request, for a model whose configuration names its `hash`.

    `token_ids` begin with the first token of the prompt; an `array("I")` is sent without being looked at one by one.
    `extra_key` is SGLang's. `lora` is the adapter's id as text for SGLang, and a LoraAdapter for vLLM. With
    `include_keys` the answer says the page keys.
    """

    token_ids: Sequence[int]
    extra_key: str | None = None
    cache_salt: str | None = None
    lora: str | LoraAdapter | None = None
    mm: Sequence[MmItem] = ()
    include_keys: bool = False
