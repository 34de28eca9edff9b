"""`forestage config`, and what every command that takes a configuration does first."""

import os
import sys

from forestage.cli.exits import Exit
from forestage.config import Config, ConfigError, load, render

__all__ = ["load_or_complain", "show"]


def load_or_complain(path: str | None) -> Config | None:
    """Load the configuration, or print one line for each mistake and return None."""
    try:
        return load(path, os.environ)
    except ConfigError as error:
        for mistake in error.mistakes:
            print(f"forestage: {mistake}", file=sys.stderr)
        return None


def show(path: str | None) -> int:
    """Print what is in effect."""
    config = load_or_complain(path)
    if config is None:
        return Exit.USAGE
    print(render(config), end="")
    return Exit.OK
