"""The adapter within SGLang itself: the checks of `in_sglang`, in a process for each version that was installed."""

import os
import subprocess
from pathlib import Path

import pytest

from integrations.engines import ENGINES, engine_or_skip

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", ["0.5.13", "0.5.23"])
def test_in_sglang(version: str, tmp_path: Path) -> None:
    root = engine_or_skip("sglang", version)
    path = os.pathsep.join(str(REPOSITORY / part) for part in ("client", "service", "tests"))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "FORESTAGE_SGLANG_ROOT": str(root),
        "FORESTAGE_SGLANG_VERSION": version,
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    }
    python = str(ENGINES / "venv" / "bin" / "python")
    command = [python, "-m", "pytest", "-q", "-c", str(HERE / "in_sglang" / "pytest.ini")]
    done = subprocess.run(
        [*command, "--basetemp", str(tmp_path / "t"), str(HERE / "in_sglang")],
        capture_output=True,
        text=True,
        env=environment,
        cwd=REPOSITORY,
        timeout=880,
        check=False,
    )
    print(done.stdout[-20_000:], done.stderr[-5000:])
    assert done.returncode == 0
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
