"""A bar on the terminal for work that takes a while."""

import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

__all__ = ["Progress"]

_WIDTH = 24
_PATIENCE_S = 1.0
_EVERY_S = 0.1


class Progress:
    """One line that is rewritten: only on a terminal, and only once the work has taken longer than a second."""

    def __init__(
        self,
        verb: str,
        total: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Show nothing yet.

        Args:
            verb: what is being done, like "copying".
            total: how many pages there are to do.
            stream: where to; stderr if not given.
            clock: monotonic seconds.
        """
        self._verb = verb
        self._total = total
        self._stream = stream or sys.stderr
        self._clock = clock
        self._began = self._shown = clock()
        self._width = 0
        self._pages = 0
        self._bytes = 0

    def add(self, pages: int, num_bytes: int) -> None:
        """So many more pages are done, with so many payload bytes."""
        self._pages += pages
        self._bytes += num_bytes
        now = self._clock()
        if now - self._began > _PATIENCE_S and now - self._shown > _EVERY_S and self._stream.isatty():
            self._shown = now
            self._show(now - self._began)

    def end(self) -> None:
        """Wipe the line."""
        if self._width:
            print("\r" + " " * self._width + "\r", end="", file=self._stream, flush=True)
            self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _show(self, seconds: float) -> None:
        share = min(1.0, self._pages / max(1, self._total))
        bar = "#" * int(share * _WIDTH)
        rate = self._bytes / seconds / 1e6
        left = seconds / share - seconds if share else 0.0
        line = f"{self._verb} [{bar:<{_WIDTH}}] {share:>4.0%}  {self._pages} of {self._total} pages  {rate:.0f} MB/s"
        line += f"  {left:.0f} s left"
        self._width = max(self._width, len(line))
        print("\r" + line.ljust(self._width), end="", file=self._stream, flush=True)
