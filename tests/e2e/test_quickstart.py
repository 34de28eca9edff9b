"""Every command of docs/quickstart.md, in one shell, in a checkout like a newcomer's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from api.error_tables import is_line
from support.redis_process import free_port

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "quickstart.md").read_text()
#: What of a checkout the commands use, and what proves that a package named there is installed here.
USED = ("Makefile", "constraints.txt", "pyproject.toml", "scripts", "service", "client", "tests")
PROOFS = {"make": "command -v make", "curl": "command -v curl", "python3-venv": "python3 -c 'import ensurepip, venv'"}
#: Exit codes other than 0 that the text announces: a prefetch that is partial.
ANNOUNCED = {"forestage prefetch": 3}


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose .venv is set up already, with what is installed where the tests run."""
    folder = tmp_path / "forestage"
    folder.mkdir()
    for name in USED:
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").mkdir()
    for part in Path(sys.prefix).iterdir():
        if part.name in {"bin", "lib", "lib64", "include", "pyvenv.cfg"}:
            (folder / ".venv" / part.name).symlink_to(part)
    (folder / ".venv" / ".serve-ready").touch()
    return folder


def _script(port: int, pool: Path) -> str:
    """Return the commands as they stand, but for port and pool, which may be taken, and the packages to install."""
    url = f"http://127.0.0.1:{port}"
    changes = {
        "apt-get install -y": "installed",
        "http://127.0.0.1:8470": url,
        "/dev/shm/forestage/pool": str(pool),
        "[pool]\n": f"[server]\nport = {port}\n[pool]\n",
        "forestage prefetch": f"forestage prefetch --url {url}",
        "forestage top": f"forestage top --url {url}",
    }
    lines = []
    for block in _blocks("sh"):
        text = block
        for old, new in changes.items():
            text = text.replace(old, new)
        lines += [text, 'echo "-- $?"\n']
    return "".join(lines)


def test_it_is_what_happens(tmp_path: Path, checkout: Path) -> None:
    proofs = "".join(f"{package}) {proof} ;;\n" for package, proof in PROOFS.items())
    packages = f'installed() {{ for p; do case "$p" in\n{proofs}*) false ;; esac || return; done; }}\n'
    port = free_port()
    # Under `make test` these would reach the make that the guide calls.
    outer = {"ARGS", "MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS"}
    environ = {name: value for name, value in os.environ.items() if name not in outer}
    environ["PYTHONPATH"] = f"{ROOT / 'service'}:{ROOT / 'client'}"
    done = subprocess.run(
        ["bash", "-c", packages + _script(port, tmp_path / "pool")],
        cwd=checkout,
        env=environ,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    codes = [int(code) for code in re.findall(r"^-- (\d+)$", done.stdout, re.MULTILINE)]
    announced = [
        next((code for command, code in ANNOUNCED.items() if command in block.splitlines()[-1]), 0)
        for block in _blocks("sh")
    ]
    assert codes == announced, done.stdout + done.stderr
    assert done.stderr == ""
    printed = iter(done.stdout.replace(str(port), "8470").splitlines())
    for shown in _blocks("text"):
        for line in shown.splitlines():
            assert any(is_line(found, line) for found in printed), f"not printed: {line}\n{done.stdout}"
    assert "30 of 30 cases as the manifest says." in done.stdout
    assert sorted(path.name for path in checkout.iterdir()) == sorted((*USED, ".venv"))
