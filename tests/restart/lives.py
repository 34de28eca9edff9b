"""Many lives of a service: started, killed, stopped and started again on the same pool file."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pool.conftest import IMPORTS, TESTS

__all__ = ["Lives"]

_PATIENCE_S = 60.0


class Lives:
    """Services out of one nursery, at most one of them at a time."""

    def __init__(self, nursery: "subprocess.Popen[str]", log: Path) -> None:
        self._nursery = nursery
        self._log = log
        self._lines: queue.Queue[str] = queue.Queue()
        self._pid = 0
        self._log_start = 0
        threading.Thread(target=self._listen, daemon=True).start()

    @classmethod
    @contextmanager
    def out_of_a_nursery(cls, log: Path) -> Iterator["Lives"]:
        """Have lives whose services write their complaints to `log`."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("FORESTAGE_")}
        environ["PYTHONPATH"] = os.pathsep.join(map(str, IMPORTS))
        with (
            log.open("w") as errors,
            subprocess.Popen(
                [sys.executable, "-m", "restart.nursery"],
                cwd=TESTS,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as nursery,
        ):
            lives = cls(nursery, log)
            try:
                yield lives
            finally:
                lives.clear()
                assert nursery.stdin is not None
                nursery.stdin.close()
                nursery.wait(_PATIENCE_S)

    def clear(self) -> None:
        """Kill a service that lives, and forget what was told so far."""
        if self._pid:
            self.kill()
        self._log_start = self._log.stat().st_size

    def begin(self, config: Path) -> None:
        """Fork a service, and do not wait for it."""
        self._tell(f"start {config}")
        self._pid = int(self._await("pid "))

    def ready(self) -> str:
        """Wait until the service is ready; return its URL."""
        return self._await("forestage ready ").split()[0]

    def start(self, config: Path) -> str:
        """Start a service; return its URL once it is ready."""
        self.begin(config)
        return self.ready()

    def signal(self, signum: int) -> None:
        os.kill(self._pid, signum)

    def freeze(self) -> None:
        """Stop every thread of the service, wherever it is; `kill` or `thaw` follows."""
        self.signal(signal.SIGSTOP)
        end = time.monotonic() + _PATIENCE_S
        while any(_state(task) != "T" for task in Path(f"/proc/{self._pid}/task").iterdir()):
            assert time.monotonic() < end
            time.sleep(0.0005)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def end(self) -> int:
        """Wait for the end of the service; return its exit status, minus the signal if one ended it."""
        self._tell("end")
        self._pid = 0
        return int(self._await("status "))

    def kill(self) -> None:
        """End the service with SIGKILL."""
        self.signal(signal.SIGKILL)
        assert self.end() in {-signal.SIGKILL, 0}

    def stop(self) -> int:
        """Stop the service in good order; return its exit status."""
        self.signal(signal.SIGTERM)
        return self.end()

    @property
    def log_end(self) -> int:
        """Where the log ends now, for `told`."""
        return self._log.stat().st_size

    def told(self, words: str, since: int = 0) -> list[str]:
        """Return the lines of the log since `clear`, or since a later `log_end`, that have these words."""
        with self._log.open() as log:
            log.seek(max(since, self._log_start))
            return [line.rstrip() for line in log if words in line]

    def _tell(self, word: str) -> None:
        assert self._nursery.stdin is not None
        self._nursery.stdin.write(f"{word}\n")
        self._nursery.stdin.flush()

    def _listen(self) -> None:
        assert self._nursery.stdout is not None
        for line in self._nursery.stdout:
            self._lines.put(line)

    def _await(self, start: str) -> str:
        """Return the rest of the next line that begins so; what a killed service said before is passed over."""
        while True:
            try:
                line = self._lines.get(timeout=_PATIENCE_S)
            except queue.Empty:
                raise AssertionError(f"waited for {start!r} in vain\n{self._log.read_text()[-4000:]}") from None
            if line.startswith(start):
                return line.removeprefix(start).strip()


def _state(task: Path) -> str:
    """Return the letter of a thread's state; one that has ended meanwhile counts as stopped."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "T"
