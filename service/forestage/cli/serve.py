"""`forestage serve` and `forestage config`."""

import logging
import os
import sys

from forestage.cli.exits import Exit
from forestage.config import Config, ConfigError, load, render
from forestage.server import run

__all__ = ["load_or_complain", "serve", "show_config"]


def load_or_complain(path: str | None) -> Config | None:
    """Load the configuration, or print one line for each mistake and return None."""
    try:
        return load(path, os.environ)
    except ConfigError as error:
        for mistake in error.mistakes:
            print(f"forestage: {mistake}", file=sys.stderr)
        return None


def serve(path: str | None, grace_s: float, log_level: str) -> int:
    """Run the service until a signal; return the exit code."""
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    config = load_or_complain(path)
    if config is None:
        return Exit.USAGE
    return run(config, grace_s, lambda line: print(line, flush=True))


def show_config(path: str | None) -> int:
    """Print what is in effect."""
    config = load_or_complain(path)
    if config is None:
        return Exit.USAGE
    print(render(config), end="")
    return Exit.OK
