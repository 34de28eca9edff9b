"""The configured models: what a page of each consists of, and what engines that store pages call it."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from forestage.config.hashing import HashConfig
from forestage.config.quantities import Bytes
from forestage.config.section import MAX_RANKS, AtLeastOne, Ranks, Section
from forestage.config.words import ComponentName, FolderName, LmcacheName, Name, Salt, ServedName, Tag, is_name
from forestage.core.layout import Component, Covers, HicacheNaming, LmcacheNaming, ModelLayout, VllmNaming
from forestage_client.hashing import HashScheme

__all__ = ["ComponentConfig", "HicacheConfig", "LmcacheConfig", "ModelConfig", "VllmConfig"]


class ComponentConfig(Section):
    """One payload kind of a page; `bytes` counts one page and one shard, `window` pages."""

    name: ComponentName
    bytes: Bytes
    covers: Literal["every_page", "tail"] = "every_page"
    window: int | None = Field(default=None, ge=1, le=2**31 - 1, validate_default=True)
    slots: int | None = Field(default=None, ge=1, le=2**31 - 1)
    shards: Ranks = 1

    @field_validator("window")
    @classmethod
    def _only_tails_have_one(cls, value: int | None, info: ValidationInfo) -> int | None:
        covers = info.data.get("covers")
        if covers == "every_page" and value is not None:
            raise ValueError('must be absent unless covers = "tail"')
        return 1 if covers == "tail" and value is None else value

    def component(self) -> Component:
        """Return this as the core knows it."""
        return Component(self.name, self.bytes, self.shards, Covers(self.covers), self.window or 0, self.slots)


class HicacheConfig(Section):
    """How SGLang's file backend names the pages of a model."""

    served_name: ServedName = ""
    naming: Literal["new", "old"] = "new"
    mla: bool = False
    tp_size: Ranks = 1
    pp_size: Ranks = 1
    cp_size: Ranks = 1

    @field_validator("cp_size")
    @classmethod
    def _has_a_place_in_the_name(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("naming") == "old":
            raise ValueError('must be 1 with naming "old", whose file names do not tell context ranks apart')
        return value

    def rule(self) -> HicacheNaming:
        """Return this as the core knows it."""
        return HicacheNaming(self.served_name, self.tp_size, self.pp_size, self.cp_size, self.mla, self.naming)


class VllmConfig(Section):
    """Where vLLM's fs tier keeps the chunks of a model."""

    folder: FolderName = ""

    def rule(self) -> VllmNaming:
        """Return this as the core knows it."""
        return VllmNaming(self.folder)


class LmcacheConfig(Section):
    """How LMCache names the pages of a model. Without a name of its own it has the model's."""

    served_name: LmcacheName | None = None
    salt: Salt = ""


class ModelConfig(Section):
    """One model. Components without `shards`, and `hicache.tp_size`, take the model's."""

    name: Name
    page_tokens: int = Field(ge=1, le=1 << 20)
    shards: Ranks = 1
    dtype: Tag = "bfloat16"
    layout: Tag = "page_first"
    hicache: HicacheConfig = HicacheConfig()
    vllm: VllmConfig = VllmConfig()
    lmcache: LmcacheConfig = LmcacheConfig()
    hash: HashConfig | None = None  # token ids are refused
    components: Annotated[tuple[ComponentConfig, ...], Field(strict=False), AtLeastOne]

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, raw: Any) -> Any:
        # Only sound values are handed down: a bad one is one mistake, not one more for each heir.
        if not isinstance(raw, dict):
            return raw
        filled = dict(raw)
        naming = {"served_name": raw["name"]} if is_name(raw.get("name")) else {}
        shards = raw.get("shards", 1)
        if type(shards) is int and 1 <= shards <= MAX_RANKS:
            naming["tp_size"] = shards
            if isinstance(components := raw.get("components"), list | tuple):
                filled["components"] = [{"shards": shards} | c if isinstance(c, dict) else c for c in components]
        if isinstance(hicache := raw.get("hicache", {}), dict):
            filled["hicache"] = naming | hicache
        return filled

    def model_layout(self) -> ModelLayout:
        """Return this as the core knows it."""
        components = tuple(component.component() for component in self.components)
        lmcache = LmcacheNaming(self.lmcache.served_name or self.name, self.lmcache.salt)
        return ModelLayout(
            self.name,
            self.page_tokens,
            components,
            self.shards,
            self.dtype,
            self.layout,
            self.hicache.rule(),
            self.vllm.rule(),
            lmcache,
        )

    def hash_scheme(self) -> HashScheme | None:
        """Return how page keys come from token ids, None if that is not said."""
        if self.hash is None:
            return None
        return HashScheme(self.hash.scheme, self.page_tokens, self.hash.seed, self.hash.bigram)
