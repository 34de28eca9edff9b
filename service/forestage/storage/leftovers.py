"""Files that writers left under a temporary name because they were killed.

Law: only a regular file that is called as our writers call theirs, and that nobody has written to for an hour, is
removed.
"""

import contextlib
import os
import re
import threading
import uuid
from collections.abc import Iterable

__all__ = ["OLD_S", "new_temporary", "sweep"]

OLD_S = 3600.0
# `.{uuid4 in hex}.tmp`: version and variant of the UUID stand at fixed places.
_OURS = re.compile(r"\.[0-9a-f]{12}4[0-9a-f]{3}[89ab][0-9a-f]{15}\.tmp")
# After so many names the interpreter is left to others for so long: a large directory must not slow readers down.
_NAMES_A_TURN = 2000
_PAUSE_S = 0.002


def new_temporary(directory: str) -> str:
    """Return the path of a file of our own that is being written in `directory`; nobody else has that name."""
    return f"{directory}/.{uuid.uuid4().hex}.tmp"


def sweep(directories: Iterable[str], now: float, stop: threading.Event) -> int:
    """Remove what killed writers left in `directories`; return how many files that were. Blocking.

    `now` is the time of the day as file systems write it down. Directories that cannot be read, and files that cannot
    be removed, are passed over; `stop` ends the sweep early.
    """
    removed = seen = 0
    for directory in directories:
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                seen += 1
                if seen % _NAMES_A_TURN == 0:
                    stop.wait(_PAUSE_S)
                if stop.is_set():
                    return removed
                if _OURS.fullmatch(entry.name) and _is_old(entry, now):
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
                        removed += 1
    return removed


def _is_old(entry: os.DirEntry[str], now: float) -> bool:
    try:
        return entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_mtime < now - OLD_S
    except OSError:
        return False
