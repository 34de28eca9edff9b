"""How the engine of a model names its pages, for requests that bring token ids in place of page keys."""

from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from forestage.config.section import Section
from forestage.config.words import Text
from forestage_client.hashing import SchemeName

__all__ = ["HashConfig"]

MAX_SEED = 1024  # characters


def _seed(value: str) -> str:
    if not 1 <= len(value) <= MAX_SEED:
        raise ValueError(f"must be 1 to {MAX_SEED} characters")
    return value


class HashConfig(Section):
    """The scheme, and the settings of the engine that enter its keys."""

    scheme: SchemeName
    seed: Annotated[Text, AfterValidator(_seed)] | None = Field(default=None, validate_default=True)
    bigram: bool = False

    @field_validator("seed")
    @classmethod
    def _belongs_to_vllm(cls, value: str | None, info: ValidationInfo) -> str | None:
        scheme = info.data.get("scheme", "")
        if scheme == "vllm-xxhash-cbor" and value is None:
            raise PydanticCustomError("no_seed", "is missing")
        if scheme.startswith("sglang") and value is not None:
            raise ValueError("must be absent unless the scheme is one of vLLM's")
        return value

    @field_validator("bigram")
    @classmethod
    def _belongs_to_sglang(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("scheme", "").startswith("vllm"):
            raise ValueError("must be false unless the scheme is one of SGLang's")
        return value
