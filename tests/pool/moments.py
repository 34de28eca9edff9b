"""Every moment at which a process can be killed while it changes the pool file."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import forestage.pool

_OURS = str(Path(forestage.pool.__file__).parent)
_WORD = 8


def moments(memory: Any, change: Callable[[], None], also: str = "") -> list[bytes]:
    """Run `change` and return how `memory` can look to whoever comes after a kill, in order, without repetitions.

    Looked at between any two lines of the pool's code (and of the file `also`). Where a line changed more than one
    word, it may have been cleared first or stopped after any of its words: those looks are made up.
    """
    seen = [bytes(memory)]

    def look(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS) and frame.f_code.co_filename != also:
            return None
        now = bytes(memory)
        if now != seen[-1]:
            seen.extend(_halfway(seen[-1], now))
            seen.append(now)
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        change()
    finally:
        sys.settrace(before)
    if bytes(memory) != seen[-1]:
        seen.append(bytes(memory))
    return seen


def _halfway(before: bytes, after: bytes) -> Iterator[bytes]:
    changed = [at for at in range(0, len(after), _WORD) if before[at : at + _WORD] != after[at : at + _WORD]]
    if len(changed) < 2:
        return
    start, end = changed[0], changed[-1] + _WORD
    yield before[:start] + bytes(end - start) + before[end:]
    for at in changed[1:]:
        yield before[:start] + bytes(at - start) + before[at:]
        yield after[:at] + before[at:]
