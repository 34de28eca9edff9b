"""`make demo` shows what it promises."""

import re
import subprocess
import sys
from pathlib import Path


def test_the_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "forestage.demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "30 of 30 cases as the manifest says." in done.stdout
    assert "13631488\nbytes through the shared pool, each equal to what SGLang wrote." in done.stdout
    assert "WRONG" not in done.stdout
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if re.search(r" \d+/\d+ ", line)}
    assert len(rows) == 30
    assert rows["trunk-room-30"][1:6] == ["30/8", "48", "48", "24", "24"]
    assert list(tmp_path.iterdir()) == []


def test_the_demo_without_its_sample(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "forestage.demo", "--data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"forestage: no sample at {tmp_path}")
