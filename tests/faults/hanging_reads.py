"""`forestage`, but reads of a file hang while one of the same name and `.hang` lies beside it, look-ups with `.lost`.

A thread that hangs so heeds no flag and no cancellation, as in a system call on a dead mount; unlike one on FUSE it
does not keep its process from ending.
"""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from forestage.cli import main

__all__: list[str] = []

_preadv, _access = os.preadv, os.access


def _wait_while_there(path: str) -> None:
    while _access(path, os.F_OK):
        time.sleep(0.01)


def _hanging_preadv(descriptor: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
    _wait_while_there(os.readlink(f"/proc/self/fd/{descriptor}") + ".hang")
    return _preadv(descriptor, buffers, offset, flags)


def _hanging_access(path: str, mode: int) -> bool:
    _wait_while_there(f"{path}.lost")
    return _access(path, mode)


if __name__ == "__main__":
    os.preadv = _hanging_preadv  # type: ignore[assignment]
    os.access = _hanging_access  # type: ignore[assignment]
    sys.exit(main())
