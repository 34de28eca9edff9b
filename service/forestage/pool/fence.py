"""The order of stores to memory that other processes read without a lock.

Law: a store before `fence` is seen by every process no later than a store after it. Words are stored through views cast
to their type, which is one access; `struct.pack_into` would show zeros in between, since it clears its target first.
"""

import platform
import sys
import threading

__all__ = ["STORES_IN_ORDER", "WORDS_AS_IN_FILE", "fence"]

# x86 keeps the stores of one core in order for every observer, so the order of the calls is the order a reader sees.
STORES_IN_ORDER = platform.machine() in {"x86_64", "AMD64", "i686", "i386"}

# The file is little endian, a cast view is as the machine is.
WORDS_AS_IN_FILE = sys.byteorder == "little"

_lock = threading.Lock()


def fence() -> None:
    """Keep stores apart where the machine does not. A release followed by an acquire does, and a lock has both."""
    with _lock:
        pass
    with _lock:
        pass
