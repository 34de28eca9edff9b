"""`forestage serve`."""

import logging
import sys

from forestage.cli.exits import Exit
from forestage.cli.settings import load_or_complain

__all__ = ["serve"]


def serve(path: str | None, grace_s: float, log_level: str) -> int:
    """Run the service until a signal; return the exit code."""
    config = load_or_complain(path)
    if config is None:
        return Exit.USAGE
    from forestage.server import run  # takes a second: a mistake in the configuration is told before

    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    return run(config, grace_s, lambda line: print(line, flush=True))
