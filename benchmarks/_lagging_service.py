"""`forestage`, whose event loop notes every millisecond by how much it is late: `LAG_FILE` gets a line each, in ms."""

import asyncio
import os
import sys
import time
from pathlib import Path

from forestage.cli import main
from forestage.prefetch.service import PrefetchService

__all__: list[str] = []

_EVERY_S = 0.001
_LINES: list[str] = []
_run = PrefetchService.run


async def _note(lines: list[str]) -> None:
    while True:
        due = time.perf_counter() + _EVERY_S
        await asyncio.sleep(_EVERY_S)
        lines.append(f"{time.time():.6f} {1e3 * (time.perf_counter() - due):.4f}\n")


async def _run_and_note(self: PrefetchService, started: asyncio.Event) -> None:
    note = asyncio.create_task(_note(_LINES))
    try:
        await _run(self, started)
    finally:
        note.cancel()
        await asyncio.wait([note])


if __name__ == "__main__":
    PrefetchService.run = _run_and_note  # type: ignore[method-assign]
    code = main()
    Path(os.environ["LAG_FILE"]).write_text("".join(_LINES))
    sys.exit(code)
