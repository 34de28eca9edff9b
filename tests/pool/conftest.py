"""Places for pool files, and processes that look at them."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
IMPORTS = (TESTS, TESTS.parent / "service", TESTS.parent / "client")

Mounter = Callable[..., Path]
Launcher = Callable[..., "subprocess.Popen[str]"]


def end_of(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Let a process go on by ending its input; return its exit status and what is left of its output and errors."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.close()
    out, errors = process.stdout.read(), process.stderr.read()
    return process.wait(timeout=30), out, errors


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory in shared memory that other users may enter."""
    directory = Path(tempfile.mkdtemp(prefix="forestage-test-", dir="/dev/shm"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def mounter(tmp_path: Path) -> Iterator[Mounter]:
    """Mount small file systems; needs root."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    with ExitStack() as undo:

        def mount(options: str, kind: str = "tmpfs") -> Path:
            directory = Path(tempfile.mkdtemp(dir=tmp_path))
            subprocess.run(["mount", "-t", kind, "-o", options, "none", directory], check=True)
            undo.callback(partial(subprocess.run, ["umount", "-l", directory], check=True))
            return directory

        yield mount


@pytest.fixture
def launch() -> Iterator[Launcher]:
    """Start `python -m pool.<module>` with arguments; ended with the test."""
    with ExitStack() as undo:

        def start(module: str, *arguments: object) -> "subprocess.Popen[str]":
            process = undo.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", f"pool.{module}", *map(str, arguments)],
                    cwd=TESTS,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, IMPORTS))},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            undo.callback(process.kill)
            return process

        yield start
