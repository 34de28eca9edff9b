"""What stops a start: the exit code is not 0, the reason is one line, and nothing is left behind (FAULTS S10)."""

import os
import socket
import time
from pathlib import Path

import pytest

from api.error_tables import is_line, table
from faults.bad_starts import BAD_STARTS, NEEDS_ROOT
from forestage.cli.main import main
from support.configs import write_config
from support.running import refusing, start_refused


def _lines(errors: str) -> list[str]:
    """What was said, without the log."""
    return [line for line in errors.splitlines() if line.startswith("forestage: ")]


def test_every_mistake_has_a_line_of_its_own(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        pool='pni = "none"\nmode = "9"',
        server="port = 99999",
        prefetch="max_pages = 0",
        more='[redis]\nurl = "redis://:secret@h"',
    )
    began = time.monotonic()
    code, errors = start_refused(config, {"FORESTAGE_POOL__BYTES": "-1", "FORESTAGE_PORT": "1"})
    assert time.monotonic() - began < 5
    assert code == 2
    lines = _lines(errors)
    named = [line.split()[1].rstrip(":") for line in lines]
    assert sorted(named) == sorted(
        [
            "pool.pni",
            "pool.mode",
            "pool.bytes",
            "server.port",
            "prefetch.max_pages",
            "redis",
            "FORESTAGE_PORT",
        ]
    )
    assert lines == errors.splitlines()
    assert "secret" not in errors
    assert not (tmp_path / "pool").exists()


def test_a_token_file_that_is_not_there(tmp_path: Path) -> None:
    code, errors = start_refused(write_config(tmp_path, server='port = 0\ntoken_file = "/nonexistent"'))
    (line,) = _lines(errors)
    assert (code, line.startswith("forestage: server.token_file: ")) == (2, True)


def test_a_file_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.toml").write_text("[pool\n")
    for path in (tmp_path / "missing.toml", tmp_path / "bad.toml", tmp_path):
        assert main(["config", "--config", str(path)]) == 2
        (line,) = _lines(capsys.readouterr().err)
        assert line.startswith(f"forestage: {path}: ")


@pytest.mark.parametrize("situation", BAD_STARTS)
def test_a_situation(tmp_path: Path, situation: str) -> None:
    if situation in NEEDS_ROOT and os.geteuid() != 0:
        pytest.skip(f"{NEEDS_ROOT[situation]} needs root")
    documented = {situation: line for situation, line, *_ in table("Refused starts")}
    assert set(documented) == set(BAD_STARTS)
    with BAD_STARTS[situation](tmp_path) as bad:
        before = {path.name for path in tmp_path.iterdir()}
        code, errors = start_refused(bad.config, wrapper=bad.wrapper)
        (line,) = _lines(errors)
        assert is_line(line, f"forestage: {documented[situation]}"), line
        assert (code, "Traceback" in errors, "secret-of-somebody" in errors) == (2, False, False)
        assert errors.splitlines()[-1] == line
        left = {path.name for path in tmp_path.iterdir()} - before
        assert left <= {"pool"} if "L3" in situation else not left


def test_a_pool_that_is_too_small_for_its_slots(tmp_path: Path) -> None:
    config = write_config(tmp_path, slots=100_000, pool_bytes="8MiB")
    code, errors = start_refused(config)
    (line,) = _lines(errors)
    assert (code, line.startswith("forestage: pool.bytes: ")) == (2, True)


def test_a_port_that_another_takes_meanwhile(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))  # two may bind as long as none listens
        config = write_config(tmp_path, server=f"port = {other.getsockname()[1]}")
        with refusing(config) as process:
            end = time.monotonic() + 10
            while not (tmp_path / "pool").exists():
                assert time.monotonic() < end
            other.listen()
            said, errors = process.communicate(timeout=10)
    assert "Traceback" not in errors, errors
    (line,) = _lines(errors)
    assert (process.returncode, said, line.startswith("forestage: server.port: cannot listen")) == (2, "", True)
