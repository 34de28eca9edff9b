"""Sets up the logs of a process."""

import logging
import os
from collections.abc import Iterable
from typing import Literal

from forestage.observe.log_lines import JsonLines, Lines, TextLines
from forestage.observe.log_writer import LogWriter

__all__ = ["LogForm", "configure_logs"]

LogForm = Literal["auto", "text", "json"]


def configure_logs(level: str, form: LogForm, secrets: Iterable[str], fd: int = 2) -> Lines:
    """Write everything from `level` on to `fd`, with `secrets` masked; `auto` is text for a terminal, else JSON.

    Returns what forms the lines, which can be told more secrets.
    """
    if form == "auto":
        form = "text" if os.isatty(fd) else "json"
    lines = TextLines(secrets) if form == "text" else JsonLines(secrets)
    writer = LogWriter(fd)
    writer.setFormatter(lines)
    root = logging.getLogger()
    root.addHandler(writer)
    root.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    return lines
