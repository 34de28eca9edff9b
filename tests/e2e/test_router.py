"""The router example finds more with the service's help than without."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROUTER = Path(__file__).resolve().parents[2] / "examples" / "router.py"


@pytest.mark.timeout(240)
def test_scoring_and_prefetch_find_more_than_round_robin(tmp_path: Path) -> None:
    command = [sys.executable, str(ROUTER), "--requests", "40", "--slots", "400", "--trace", str(tmp_path / "none")]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FORESTAGE_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path, env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("40 requests of a generated trace over 3 pods of 400 pages\n")
    rows = re.findall(
        r"^(round robin|scored).*?(\d+) +(\d+) +[\d.]+ % +(\d+) +(\d+)/(\d+)/(\d+) ", done.stdout, re.MULTILINE
    )
    (_, pages, plain, none, *blind), (_, same, scored, loaded, *chosen) = rows
    assert pages == same
    assert int(plain) < int(scored) < int(pages)
    assert (int(none), int(loaded) > 0) == (0, True)
    for served in (blind, chosen):
        assert sum(map(int, served)) == 40
    assert min(map(int, chosen)) > 3  # all pods work
