"""The tier within vLLM itself: the checks of `in_vllm`, in a process that imports the wheel."""

import os
import subprocess
from pathlib import Path

import pytest

from integrations.engines import ENGINES, engine_or_skip

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]


@pytest.mark.timeout(400)
def test_in_vllm(tmp_path: Path) -> None:
    root = engine_or_skip("vllm", "0.33.0")
    path = os.pathsep.join([str(root), *(str(REPOSITORY / part) for part in ("client", "service", "tests"))])
    command: list[str | Path] = [
        ENGINES / "vllm-venv" / "bin" / "python",
        "-m",
        "pytest",
        "-q",
        "-c",
        HERE / "in_vllm" / "pytest.ini",
    ]
    done = subprocess.run(
        [*command, "--basetemp", tmp_path / "t", HERE / "in_vllm"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "VLLM_NO_USAGE_STATS": "1"},
        cwd=REPOSITORY,
        timeout=380,
        check=False,
    )
    print(done.stdout[-20_000:], done.stderr[-5000:])
    assert done.returncode == 0
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
