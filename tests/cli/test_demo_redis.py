"""`make demo-redis`, as a newcomer sees it."""

import os
import subprocess
import sys
from pathlib import Path

from support.redis_process import redis_server_or_skip


def _demo(*arguments: str, path: str | None = None) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "forestage.demo_redis", *arguments]
    environment = None if path is None else {**os.environ, "PATH": path}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


def test_every_case_is_as_the_manifest_says() -> None:
    done = _demo("--server", redis_server_or_skip())
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("redis-server on port ")
    assert lines[-2].startswith("30 of 30 cases as the manifest says.")
    assert lines[-1] == "bytes through the shared pool, each equal to what SGLang wrote."
    assert "WRONG" not in done.stdout


def test_says_what_to_install(tmp_path: Path) -> None:
    done = _demo("--server", "no-such-server", path=str(tmp_path))
    assert done.returncode == 2
    assert "apt-get install redis-server" in done.stderr


def test_says_why_a_server_did_not_start(tmp_path: Path) -> None:
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\necho out of coffee\nexit 1\n")
    broken.chmod(0o755)
    done = _demo("--server", str(broken))
    assert done.returncode == 1
    assert "out of coffee" in done.stderr
