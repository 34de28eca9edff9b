"""Writes log lines from a thread of its own, so that the event loop never waits for whoever reads the log.

Law: lines come out whole and in order; at most `max_lines` wait. What comes while so many wait is dropped, and how many
those were is said as soon as there is room again.
"""

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque

__all__ = ["LogWriter"]

_LAST_LINES_S = 1.0  # how long the end of the process waits for a reader that is slow
_ROOM_S = 0.1


class LogWriter(logging.Handler):
    """A handler that takes a line in microseconds, even while nobody takes it off the other end of the pipe."""

    def __init__(self, fd: int, max_lines: int = 10_000) -> None:
        """Start the thread.

        Args:
            fd: where lines go; it is not closed here.
            max_lines: how many may wait.
        """
        super().__init__()
        self._fd = fd
        self._max_lines = max_lines
        self._waiting: deque[str] = deque()
        self._changed = threading.Condition()
        self._writing = False
        self._closed = False
        self._dropped = 0
        self._thread = threading.Thread(target=self._write_on, name="forestage-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            if len(self._waiting) >= self._max_lines:
                self._dropped += 1
            else:
                self._waiting.append(line)
                if not self._writing:
                    self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything is written, a second at most."""
        deadline = time.monotonic() + _LAST_LINES_S
        with self._changed:
            while self._waiting or self._writing:
                if not self._changed.wait(deadline - time.monotonic()):
                    return

    def close(self) -> None:
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        super().close()

    def _write_on(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                self._writing = True
                lines, dropped = list(self._waiting), self._dropped
                self._waiting.clear()
                self._dropped = 0
            if dropped:
                lines.append(self._of_dropped(dropped))
            with contextlib.suppress(OSError):  # nobody reads any more, and there is no other place to say so
                self._write(("\n".join(lines) + "\n").encode(errors="backslashreplace"))

    def _of_dropped(self, count: int) -> str:
        message = "log lines were dropped: whoever reads them is too slow"
        record = logging.LogRecord("forestage.log", logging.WARNING, __file__, 0, message, None, None)
        record.fields = {"dropped": count}
        return self.format(record)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                select.select([], [self._fd], [], _ROOM_S)
