"""What stops a start: the exit code is not 0, the reason is one line, and nothing is left behind (FAULTS S10)."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from api.error_tables import is_line, table
from forestage.cli.main import main
from support.configs import write_config
from support.running import refusing, running, start_refused


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


Configured = Iterator[Path]


@contextmanager
def _port_in_use(folder: Path) -> Configured:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield write_config(folder, server=f"port = {taken.getsockname()[1]}")


@contextmanager
def _foreign_address(folder: Path) -> Configured:
    yield write_config(folder, server='host = "192.0.2.1"\nport = 0')


@contextmanager
def _file_at_socket(folder: Path) -> Configured:
    (folder / "s").write_text("a file of somebody")
    yield write_config(folder, server=f'port = 0\nuds = "{folder}/s"')
    assert (folder / "s").read_text() == "a file of somebody"


@contextmanager
def _socket_in_use(folder: Path) -> Configured:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(folder / "s"))
        other.listen()
        yield write_config(folder, server=f'port = 0\nuds = "{folder}/s"')


@contextmanager
def _pool_in_use(folder: Path) -> Configured:
    config = write_config(folder)
    with running(config) as owner:
        status = (folder / "pool").stat()
        assert status.st_blocks * 512 >= status.st_size > 64 * 4096  # all of it is there
        yield config
        assert owner.stop() == 0  # which the refused one has not disturbed


@contextmanager
def _small_mount(folder: Path) -> Configured:
    mount = folder / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", mount], check=True)
    try:
        config = write_config(folder, slots=512)
        config.write_text(config.read_text().replace(f'path = "{folder}/pool"', f'path = "{mount}/pool"'))
        yield config
        assert list(mount.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


@contextmanager
def _no_place_for_pool(folder: Path) -> Configured:
    config = write_config(folder)
    config.write_text(config.read_text().replace(f'path = "{folder}/pool"', 'path = "/proc/forestage/pool"'))
    yield config


@contextmanager
def _no_place_for_l3(folder: Path) -> Configured:
    (folder / "file").write_text("")
    sections = {"storage.file": f'root = "{folder}/file/l3"'}
    yield write_config(folder, **sections)  # type: ignore[arg-type]


SITUATIONS: dict[str, Callable[[Path], AbstractContextManager[Path]]] = {
    "port in use": _port_in_use,
    "address of another machine": _foreign_address,
    "a file where the unix socket should be": _file_at_socket,
    "unix socket in use": _socket_in_use,
    "pool in use": _pool_in_use,
    "pool larger than its mount": _small_mount,
    "no place for the pool": _no_place_for_pool,
    "no place for L3": _no_place_for_l3,
}


@pytest.fixture
def _as_before() -> Iterator[None]:
    """Undo what `serve` does to its process."""
    signals = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    interval, handlers, level = sys.getswitchinterval(), logging.root.handlers[:], logging.root.level
    yield
    for signum, handler in signals.items():
        signal.signal(signum, handler)
    sys.setswitchinterval(interval)
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    logging.getLogger("uvicorn").setLevel(logging.NOTSET)


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_situation(tmp_path: Path, capsys: pytest.CaptureFixture[str], situation: str) -> None:
    if situation == "pool larger than its mount" and os.geteuid() != 0:
        pytest.skip("mounting needs root")
    documented = {situation: line for situation, line, *_ in table("Refused starts")}
    assert set(documented) == set(SITUATIONS)
    with SITUATIONS[situation](tmp_path) as config:
        began = time.monotonic()
        assert main(["serve", "--config", str(config)]) == 2
        assert time.monotonic() - began < 5
        said = capsys.readouterr()
        (line,) = _lines(said.err)
        assert is_line(line, f"forestage: {documented[situation]}"), line
        assert (said.out, "Traceback" in said.err) == ("", False)
    if situation not in ("pool in use", "no place for L3"):
        assert not (tmp_path / "pool").exists()


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
