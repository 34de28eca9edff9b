"""Configurations as text, loaded through a real file."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from forestage.config import Config, ConfigError, load

__all__ = ["MINIMAL", "load_text", "mistakes_of"]

MINIMAL = """
[[models]]
name = "demo"
page_tokens = 64
[[models.components]]
name = "kv"
bytes = 65536
"""


def load_text(text: str | bytes, environ: Mapping[str, str] | None = None) -> Config:
    """Load a configuration whose file holds this text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "forestage.toml")
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load(str(path), environ or {})


def mistakes_of(text: str | bytes, environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the mistakes of a configuration; none if it is sound. No line may hold a break."""
    try:
        load_text(text, environ)
    except ConfigError as raised:
        error = raised
    else:
        return []
    assert error.mistakes
    assert "\n".join(error.mistakes) == str(error) == error.detail
    assert all(line.isprintable() for line in error.mistakes)
    return error.mistakes
