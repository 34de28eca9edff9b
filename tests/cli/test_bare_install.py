"""With nothing but the light client installed, commands that need more say what to install."""

import subprocess
import sys

import pytest

_BARE = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from forestage.cli import main
sys.exit(main({words}))
"""
EXTRA = {"fastapi", "starlette", "uvicorn", "uvloop", "httptools", "prometheus_client", "xxhash", "redis", "torch",
         "pydantic", "pydantic_core"}  # fmt: skip


def _run_bare(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", _BARE.format(absent=sorted(EXTRA), words=list(words))]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--config", "examples/forestage.toml"],
        ["config", "--config", "examples/forestage.toml"],
        ["l3", "put", "--config", "c", "--model", "m", "--from", "file:d"],
    ],
    ids=lambda words: words[0],
)
def test_what_the_service_needs(words: list[str]) -> None:
    done = _run_bare(*words)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("forestage: needs ")
    assert line.endswith('pip install "forestage[service]"')


def test_what_the_client_can_do() -> None:
    for words in (["--help"], ["--version"], ["prefetch", "--help"]):
        assert _run_bare(*words).returncode == 0
    asked = _run_bare("status", "--url", "http://127.0.0.1:9")
    assert asked.returncode == 1
    assert "install" not in asked.stderr
