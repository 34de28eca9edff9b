"""A real `forestage serve` process on loopback, for tests from outside."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["HANGING", "Running", "refusing", "running", "start_refused"]

START_S = 60.0
#: An entry whose reads hang when the test wants it: see tests/faults/hanging_reads.py.
HANGING = (str(Path(__file__).parent.parent / "faults" / "hanging_reads.py"),)


def _command(config: Path, *more: str, entry: Sequence[str] = ("-m", "forestage")) -> list[str]:
    return [sys.executable, *entry, "serve", "--config", str(config), *more]


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FORESTAGE_")}
    return {**inherited, **environ}


@dataclass
class Running:
    """A service that said it is ready."""

    process: subprocess.Popen[str]
    ready: str
    log: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.ready.split()[2]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self, signum: int = signal.SIGTERM, timeout_s: float = 20.0) -> int:
        """Signal the service, and return its exit code."""
        self.process.send_signal(signum)
        return self.process.wait(timeout_s)


@contextmanager
def running(
    config: Path, *more: str, environ: Mapping[str, str] | None = None, entry: Sequence[str] = ("-m", "forestage")
) -> Iterator[Running]:
    """Start a service and wait until it is ready; it is ended by its process id at the latest here."""
    process = subprocess.Popen(
        _command(config, *more, entry=entry),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(environ or {}),
    )
    assert process.stdout is not None
    log: list[str] = []
    drain = threading.Thread(target=_drain, args=(process, log), daemon=True)
    drain.start()
    guard = threading.Timer(START_S, process.kill)
    guard.start()
    try:
        ready = process.stdout.readline()
        guard.cancel()
        if not ready.startswith("forestage ready "):
            process.wait(10)
            drain.join(5)
            raise AssertionError(f"not ready: {ready!r}\n" + "".join(log))
        yield Running(process, ready.strip(), log)
    finally:
        guard.cancel()
        if process.poll() is None:
            process.kill()
        process.wait(10)
        drain.join(5)
        process.stdout.close()
        assert process.stderr is not None
        process.stderr.close()


def _drain(process: subprocess.Popen[str], log: list[str]) -> None:
    assert process.stderr is not None
    log.extend(process.stderr)


@contextmanager
def refusing(config: Path) -> Iterator["subprocess.Popen[str]"]:
    """Start a service that will not come to serve; the caller sees to that, and reads what it says."""
    command, environ = _command(config), _environment({})
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        try:
            yield process
        finally:
            process.kill()


def start_refused(
    config: Path, environ: Mapping[str, str] | None = None, timeout_s: float = 60.0, wrapper: Sequence[str] = ()
) -> tuple[int, str]:
    """Start a service that must refuse; return its exit code and what it said on stderr.

    `wrapper` are the words before the command.
    """
    done = subprocess.run(
        [*wrapper, *_command(config)],
        capture_output=True,
        text=True,
        env=_environment(environ or {}),
        timeout=timeout_s,
        check=False,
    )
    assert "forestage ready" not in done.stdout
    return done.returncode, done.stderr
