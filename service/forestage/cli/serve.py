"""`forestage serve`."""

import os

from forestage.cli.exits import Exit
from forestage.cli.settings import load_or_complain
from forestage.config import Config, load
from forestage.config.secrets import secrets_of
from forestage.observe.logs import LogForm, configure_logs

__all__ = ["serve"]


def serve(path: str | None, grace_s: float, log_level: str, log_form: LogForm) -> int:
    """Run the service until a signal; return the exit code."""
    config = load_or_complain(path)
    if config is None:
        return Exit.USAGE
    from forestage.server import run  # takes a second: a mistake in the configuration is told before

    lines = configure_logs(log_level, log_form, secrets_of(config))

    def reread() -> Config:
        again = load(path, os.environ)
        lines.mask(secrets_of(again))  # before anybody can send them
        return again

    return run(config, grace_s, lambda line: print(line, flush=True), reread)
