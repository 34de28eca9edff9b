"""The configured tenants: who is promised a share of the pool, and by which token it is known."""

from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from forestage.config.section import Section
from forestage.config.words import Text
from forestage.core.tenants import TenantShare

__all__ = ["TenantConfig"]

MAX_NAME = 128  # characters, as in a request


def _name(value: str) -> str:
    if not 1 <= len(value) <= MAX_NAME:
        raise ValueError(f"must be 1 to {MAX_NAME} characters")
    return value


class TenantConfig(Section):
    """One tenant. Shares are fractions of the slots of every component."""

    name: Annotated[Text, AfterValidator(_name)]
    min_share: float = Field(default=0.0, ge=0, le=1)
    max_share: float = Field(default=1.0, gt=0, le=1)
    token_file: Text = ""  # empty: known only by the name in a request

    @field_validator("max_share")
    @classmethod
    def _not_below_the_promise(cls, value: float, info: ValidationInfo) -> float:
        if value < info.data.get("min_share", 0.0):
            raise ValueError(f"must be at least min_share ({info.data['min_share']})")
        return value

    def share(self) -> TenantShare:
        """Return this as the core knows it."""
        return TenantShare(self.name, float(self.min_share), float(self.max_share))
