"""Tokens beside `server.token_file` and those of tenants: who may only read, who may write, and for whom."""

from typing import Literal

from forestage.config.section import Section
from forestage.config.words import Path, Text

__all__ = ["MAX_TOKENS", "TokenConfig"]

MAX_TOKENS = 256  # each makes every look at a header a microsecond longer


class TokenConfig(Section):
    """One token, by the file that holds it."""

    token_file: Path
    role: Literal["read", "write", "admin"]
    tenant: Text = ""  # empty: may act for any
