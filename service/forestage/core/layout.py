"""What a page of a model consists of: components, shards, strides, and the fingerprint that names it in L3."""

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

__all__ = ["Component", "Covers", "HicacheNaming", "LmcacheNaming", "ModelLayout", "VllmNaming"]

PAGE_ALIGN = 4096  # what O_DIRECT and page tables want
CACHE_LINE = 64


class Covers(StrEnum):
    """Which pages of a restored prefix need a payload of this component."""

    EVERY_PAGE = "every_page"
    TAIL = "tail"


# Not slotted: what follows from the fields is asked for once a page, so it is computed once a component.
@dataclass(frozen=True)
class Component:
    """One payload kind of a page.

    `bytes` is the payload of one page and one shard; `window` (pages, tail only) is how many of the last
    pages of a prefix need it; `slots` is the configured number of pool slots, None to share what is left.
    """

    name: str
    bytes: int
    shards: int = 1
    covers: Covers = Covers.EVERY_PAGE
    window: int = 0
    slots: int | None = None

    @cached_property
    def is_tail(self) -> bool:
        return self.covers is Covers.TAIL

    @cached_property
    def shard_bytes(self) -> int:
        """Stride of one shard in a slot: the payload rounded up, so that every shard starts aligned."""
        align = PAGE_ALIGN if self.bytes >= PAGE_ALIGN else CACHE_LINE
        return -(-self.bytes // align) * align

    @cached_property
    def slot_bytes(self) -> int:
        return self.shards * self.shard_bytes


@dataclass(frozen=True, slots=True)
class HicacheNaming:
    """How SGLang's file backend names the pages of a model (`naming`: "new" is 0.5.23, "old" is 0.5.13)."""

    served_name: str
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    mla: bool = False
    naming: str = "new"


@dataclass(frozen=True, slots=True)
class VllmNaming:
    """The folder below its root in which vLLM's fs tier keeps the chunks of a model."""

    folder: str


@dataclass(frozen=True, slots=True)
class LmcacheNaming:
    """How LMCache names the pages of a model; `salt` is the `cache_salt` of the requests that they are for."""

    served_name: str
    salt: str = ""


@dataclass(frozen=True)
class ModelLayout:
    """A configured model: its page size in tokens and its components, in configured order."""

    name: str
    page_tokens: int
    components: tuple[Component, ...]
    shards: int = 1
    dtype: str = "bfloat16"
    layout: str = "page_first"
    hicache: HicacheNaming | None = None
    vllm: VllmNaming | None = None
    lmcache: LmcacheNaming | None = None

    @cached_property
    def fingerprint(self) -> str:
        """32 hex characters over everything that changes bytes; pool sizes and slot counts do not enter."""
        described = {
            "name": self.name,
            "page_tokens": self.page_tokens,
            "dtype": self.dtype,
            "layout": self.layout,
            "shards": self.shards,
            "components": [
                [c.name, c.bytes, c.covers.value, c.window if c.is_tail else 0, c.shards] for c in self.components
            ],
        }
        canonical = json.dumps(described, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]

    @cached_property
    def every_page(self) -> tuple[int, ...]:
        """Indexes of the components that every page of a prefix needs."""
        return tuple(i for i, c in enumerate(self.components) if not c.is_tail)

    @cached_property
    def tails(self) -> tuple[int, ...]:
        """Indexes of the components that only the window before a prefix end needs."""
        return tuple(i for i, c in enumerate(self.components) if c.is_tail)
