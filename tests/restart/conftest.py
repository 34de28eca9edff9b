"""The pool's fixtures (a directory in shared memory, the compiled readers), and a Python reader."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pool.conftest import IMPORTS, TESTS, compiled, shm, sweep
from restart.lives import Lives

__all__ = ["attach", "compiled", "lives", "nursery", "shm", "sweep"]


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """Where services come from, for all tests."""
    with Lives.out_of_a_nursery(tmp_path_factory.mktemp("nursery") / "log") as lives:
        yield lives


@pytest.fixture
def lives(nursery: Lives) -> Iterator[Lives]:
    """Services of one test."""
    nursery.clear()
    yield nursery
    nursery.clear()


@pytest.fixture
def attach() -> Iterator[Callable[[str, Path], "subprocess.Popen[str]"]]:
    """Start a module as a reader of a pool; ended with the test."""
    with ExitStack() as undo:

        def start(module: str, pool: Path) -> "subprocess.Popen[str]":
            process = undo.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", module, pool],
                    cwd=TESTS,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, IMPORTS))},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            undo.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "attached\n"
            return process

        yield start
