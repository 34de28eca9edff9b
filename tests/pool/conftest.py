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

EXAMPLES = TESTS.parent / "client" / "examples"

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


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the example reader, `pool_reader`, and `hammer`, which calls its insides."""
    if shutil.which("cc") is None:
        pytest.fail("no C compiler: apt-get install gcc libc6-dev")
    directory = tmp_path_factory.mktemp("compiled")
    for source in (EXAMPLES / "pool_reader.c", TESTS / "pool" / "hammer.c"):
        command = ["cc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{EXAMPLES}"]
        built = subprocess.run(
            [*command, "-o", directory / source.stem, source], capture_output=True, text=True, check=False
        )
        assert built.returncode == 0, built.stderr
    return directory


@pytest.fixture
def sweep(compiled: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start the C reader on all slots of a region at a path; told by `end_of`, it prints what came of it."""
    with ExitStack() as undo:

        def start(
            path: str | Path, model: str = "demo", component: str = "kv", pause_ms: int = 0
        ) -> "subprocess.Popen[str]":
            process = undo.enter_context(
                subprocess.Popen(
                    [compiled / "hammer", "sweep", path, model, component, str(pause_ms)],
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
