"""Services without the time of their imports: each is forked from this process, which has made them.

`python -m restart.nursery`. Told "start CONFIG", it forks a service and prints "pid N"; told "end", it waits until that
process has ended and prints "status N". What the services print comes out in between.
"""

import os
import signal
import sys

import forestage.server  # noqa: F401  (what takes the time)
from forestage.cli.main import main


def serve(config: str) -> int:
    """Be a service, in a process of its own."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main(["serve", "--config", config])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def nurse() -> None:
    pid = 0
    while line := sys.stdin.readline():
        word, _, config = line.strip().partition(" ")
        if word == "start":
            pid = os.fork()
            if pid == 0:
                os._exit(serve(config))
            print(f"pid {pid}", flush=True)
        else:
            print(f"status {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}", flush=True)


if __name__ == "__main__":
    nurse()
