"""Files that writers left under a temporary name because they were killed.

Law: only a regular file that is called as our writers call theirs, and that nobody has written to for an hour, is
removed.
"""

import contextlib
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator

from forestage.storage.beneath import FOLDER_FLAGS

__all__ = ["OLD_S", "new_temporary", "new_temporary_name", "sweep"]

OLD_S = 3600.0
# `.{uuid4 in hex}.tmp`: version and variant of the UUID stand at fixed places.
_OURS = re.compile(r"\.[0-9a-f]{12}4[0-9a-f]{3}[89ab][0-9a-f]{15}\.tmp")
# After so many names the interpreter is left to others for so long: a large directory must not slow readers down.
_NAMES_A_TURN = 2000
_PAUSE_S = 0.002


def new_temporary(directory: str) -> str:
    """Return the path of a file of our own that is being written in `directory`; nobody else has that name."""
    return f"{directory}/{new_temporary_name()}"


def new_temporary_name() -> str:
    """Return the name of a file of our own that is being written."""
    return f".{uuid.uuid4().hex}.tmp"


def sweep(
    directories: Iterable[str], now: float, stop: threading.Event, open_folder: Callable[[str], int] | None = None
) -> int:
    """Remove what killed writers left in `directories`; return how many files that were. Blocking.

    `now` is the time of the day as file systems write it down; `open_folder` opens a directory to look into. Those that
    cannot be read, and files that cannot be removed, are passed over; `stop` ends the sweep early.
    """
    removed = seen = 0
    for directory in directories:
        with contextlib.suppress(OSError), _opened(directory, open_folder) as folder, os.scandir(folder) as entries:
            for entry in entries:
                seen += 1
                if seen % _NAMES_A_TURN == 0:
                    stop.wait(_PAUSE_S)
                if stop.is_set():
                    return removed
                if _OURS.fullmatch(entry.name) and _is_old(entry, now):
                    with contextlib.suppress(OSError):
                        os.unlink(entry.name, dir_fd=folder)
                        removed += 1
    return removed


@contextlib.contextmanager
def _opened(directory: str, open_folder: Callable[[str], int] | None) -> Iterator[int]:
    descriptor = os.open(directory, FOLDER_FLAGS) if open_folder is None else open_folder(directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_old(entry: os.DirEntry[str], now: float) -> bool:
    try:
        return entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_mtime < now - OLD_S
    except OSError:
        return False
