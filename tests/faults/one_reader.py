"""A process that attaches to a pool, reads all that is resident, and ends in one way or another.

Called with the path, or with a name for the standard library's shared memory, and how to end: exit, raise, kill.
"""

import os
import signal
import sys
from multiprocessing.shared_memory import SharedMemory

from forestage_client.pool_view import PoolView

__all__: list[str] = []


def _end(how: str) -> None:
    if how == "raise":
        raise RuntimeError("told to fail")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def main(target: str, how: str) -> None:
    if not target.startswith("/"):
        memory = SharedMemory(name=target)
        print(memory.size, flush=True)
        _end(how)
        memory.close()
        return
    view = PoolView(target)
    resident = [entry for entry in view.slots("m", "kv") if entry.state == "resident"]
    print(len([view.copy("m", "kv", entry.slot, entry.key) for entry in resident]), flush=True)
    _end(how)
    if how == "exit":
        view.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
