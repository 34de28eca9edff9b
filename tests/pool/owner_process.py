"""A service's start in a process of its own: `python -m pool.owner_process '{"path": ..., "bytes": ...}'`.

Prints one JSON object: what was achieved, or the error's line. Setting the scene: `nobody` gives up root, `memlock` is
the limit in bytes, `refuse_advice` an errno that seccomp answers to MADV_POPULATE_WRITE, `crowd` a file that takes half
of the mount's room between the check and the backing. `die` ends the process with SIGKILL after so many steps of
backing memory, `hold` keeps the pool until stdin ends. `contend` starts and stops so many times, and fails if it ever
is not alone.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from forestage.core.errors import StartError
from forestage.pool import blueprint as blueprint_module
from forestage.pool.file import PoolFile, PoolSettings
from forestage.pool.populate import populate
from forestage_client.pool_view import PoolView
from pool.pages import DEMO

NOBODY = 65534
_MADVISE = {"x86_64": 28, "aarch64": 233}
_MADV_POPULATE_WRITE = 23


def refuse_advice(number: int) -> None:
    """Have the kernel answer MADV_POPULATE_WRITE with an errno, as one that does not know it."""

    def instruction(code: int, true: int, false: int, value: int) -> bytes:
        return struct.pack("=HBBI", code, true, false, value)

    program = b"".join(
        (
            instruction(0x20, 0, 0, 0),  # load the number of the call
            instruction(0x15, 0, 3, _MADVISE[platform.machine()]),
            instruction(0x20, 0, 0, 32),  # load its third argument
            instruction(0x15, 0, 1, _MADV_POPULATE_WRITE),
            instruction(0x06, 0, 0, 0x00050000 | number),  # errno
            instruction(0x06, 0, 0, 0x7FFF0000),  # allow
        )
    )
    held = ctypes.create_string_buffer(program)
    filtering = struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, ctypes.c_char_p(filtering), 0, 0) == 0, ctypes.get_errno()


def crowd(path: str) -> Callable[..., None]:
    """Return a `populate` that first finds half of the mount taken by a file of somebody else."""

    def late(*arguments: Any) -> None:
        room = os.statvfs(os.path.dirname(path))
        with open(path, "wb") as file:
            file.write(bytes(room.f_blocks * room.f_frsize // 2))
        populate(*arguments)

    return late


def contend(settings: PoolSettings, rounds: int) -> dict[str, Any]:
    """Start and stop in a loop against others who do the same."""
    won = 0
    refused = set()
    for _ in range(rounds):
        try:
            pool = PoolFile.create(settings, (DEMO,))
        except StartError as error:
            refused.add(error.detail)
            continue
        won += 1
        alone = os.open(f"{settings.path}.alone", os.O_CREAT | os.O_EXCL)
        assert pool.is_linked()
        os.close(alone)
        os.unlink(f"{settings.path}.alone")
        pool.close()
    return {"won": won, "refused": sorted(refused)}


def start(scene: dict[str, Any]) -> dict[str, Any]:
    if scene.get("nobody") and os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    if "memlock" in scene:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (scene["memlock"], scene["memlock"]))
    if "refuse_advice" in scene:
        refuse_advice(scene["refuse_advice"])

    steps = 0

    def progress(done: int, total: int) -> None:
        nonlocal steps
        steps += 1
        if steps == scene.get("die"):
            os.kill(os.getpid(), signal.SIGKILL)

    if "crowd" in scene:
        patch.object(blueprint_module, "populate", crowd(scene["crowd"])).start()
    settings = PoolSettings(scene["path"], scene["bytes"], pin=scene.get("pin", "none"), mode=scene.get("mode", 0o660))
    if "contend" in scene:
        return contend(settings, scene["contend"])
    try:
        pool = PoolFile.create(settings, (DEMO,), progress)
    except StartError as error:
        return {"error": error.detail}
    achieved = {
        "size": pool.size,
        "backed": os.stat(pool.path).st_blocks * 512,
        "pinned": pool.pinned,
        "generation": pool.generation,
        "adopted": [[page.slot, page.key.hex(), page.page, page.dirty] for page in pool.adopted[0]],
        "torch": "torch" in sys.modules,
    }
    PoolView(pool.path).close()
    if scene.get("hold"):
        print(json.dumps(achieved), flush=True)
        sys.stdin.read()
    pool.close()
    return achieved


if __name__ == "__main__":
    print(json.dumps(start(json.loads(sys.argv[1]))), flush=True)
