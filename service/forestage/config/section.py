"""What every table of settings has in common.

Law: an instance is frozen and valid by itself; only what relates two tables is checked elsewhere (relations.py).
"""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

__all__ = ["MAX_RANKS", "AtLeastOne", "Count", "Milliseconds", "Ranks", "Section", "Timeout"]

MAX_COUNT = 2**31 - 1  # for milliseconds: about 24 days
MAX_RANKS = 65535

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Milliseconds = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Timeout = Annotated[int, Field(ge=1, le=MAX_COUNT)]  # milliseconds; 0 would give up before asking
Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]


def _not_empty(tables: tuple[object, ...]) -> tuple[object, ...]:
    if not tables:
        raise PydanticCustomError("no_tables", "is empty")
    return tables


# Field(min_length=1) would also call an array empty whose tables are all wrong.
AtLeastOne = AfterValidator(_not_empty)


class Section(BaseModel):
    """A table of settings: unknown keys, wrong types and later changes are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)
