"""The client is light to import and typed throughout."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import forestage_client

PACKAGE = Path(forestage_client.__file__).parent
LIMIT_MS = 60
HEAVY = "httpx2 httpcore2 asyncio anyio ssl socket logging torch numpy pydantic forestage fastapi redis multiprocessing"


def run(code: str, cache: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # An installed package has its bytecode; the time to compile is not the time to import.
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(cache), "PYTHONPATH": str(PACKAGE.parent)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, check=True, env=environment
    )


def import_ms(cache: Path) -> float:
    # Time on the CPU: what else the machine does meanwhile is no property of the package.
    code = "import time; began = time.process_time(); import forestage_client; print(time.process_time() - began)"
    return float(run(code, cache).stdout) * 1000


def test_importing_is_quick(tmp_path: Path) -> None:
    times: list[float] = []
    while not times or (min(times) >= LIMIT_MS and len(times) < 12):
        times.append(import_ms(tmp_path))
    assert min(times) < LIMIT_MS


@pytest.mark.parametrize("code", ["import forestage_client", "from forestage_client import AsyncClient, Client"])
def test_importing_loads_nothing_heavy(tmp_path: Path, code: str) -> None:
    loaded = run(f"{code}; import sys; print(*sys.modules)", tmp_path).stdout.split()
    assert "forestage_client" in loaded
    assert not set(HEAVY.split()) & set(loaded)


def test_the_first_client_loads_the_http_library(tmp_path: Path) -> None:
    code = "import forestage_client, sys; forestage_client.Client().close(); print('httpx2' in sys.modules)"
    assert run(code, tmp_path).stdout.strip() == "True"


def test_every_public_name_is_there() -> None:
    assert set(forestage_client.__all__) <= set(dir(forestage_client))
    assert all(getattr(forestage_client, name) is not None for name in forestage_client.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Clint'"):
        _ = forestage_client.Clint
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_function_is_annotated(path: Path) -> None:
    def bare(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        missing = [arg.arg for arg in given if arg and not arg.annotation and arg.arg not in ("self", "cls")]
        return [*missing, *(["return"] if node.returns is None else [])]

    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert {node.name: bare(node) for node in functions if bare(node)} == {}
