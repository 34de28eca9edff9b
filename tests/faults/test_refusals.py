"""What stops a start: the exit code is not 0, the reason is one line, and nothing is left behind (FAULTS S10)."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.configs import write_config
from support.running import running, start_refused


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


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, text in ((tmp_path / "missing.toml", None), (tmp_path / "bad.toml", "[pool\n"), (tmp_path, None)):
        if text is not None:
            path.write_text(text)
        code, errors = start_refused(path)
        assert code == 2
        assert str(path) in _lines(errors)[0]


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, errors = start_refused(write_config(tmp_path, server=f"port = {port}"))
    (line,) = _lines(errors)
    assert code == 2
    assert line == f"forestage: server.port: cannot listen on 127.0.0.1:{port} (Address already in use)"
    assert not (tmp_path / "pool").exists()


def test_a_host_that_is_not_ours(tmp_path: Path) -> None:
    code, errors = start_refused(write_config(tmp_path, server='host = "192.0.2.1"\nport = 0'))
    (line,) = _lines(errors)
    assert (code, line.startswith("forestage: server.host: ")) == (2, True)


def test_a_unix_socket_that_is_in_the_way(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("a file of somebody")
    config = write_config(tmp_path, server=f'port = 0\nuds = "{path}"')
    code, errors = start_refused(config)
    assert (code, _lines(errors)) == (2, [f"forestage: server.uds: {path} exists and is no socket"])
    assert path.read_text() == "a file of somebody"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        code, errors = start_refused(config)
        assert (code, _lines(errors)) == (2, [f"forestage: server.uds: another service listens on {path}"])
    with running(config) as service:  # a dead one is replaced
        assert service.stop() == 0


def test_a_second_owner(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with running(config) as service:
        status = (tmp_path / "pool").stat()
        assert status.st_blocks * 512 >= status.st_size > 64 * 4096  # all of it is there
        code, errors = start_refused(config)
        (line,) = _lines(errors)
        assert code == 2
        assert line == f"forestage: pool.path: {tmp_path}/pool is in use by another running service"
        assert service.stop() == 0  # which the refused one has not disturbed


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", mount], check=True)
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


def test_a_pool_twice_its_mount(tmp_path: Path, small_mount: Path) -> None:
    config = write_config(tmp_path, slots=512)
    config.write_text(config.read_text().replace(f'path = "{tmp_path}/pool"', f'path = "{small_mount}/pool"'))
    began = time.monotonic()
    code, errors = start_refused(config)
    assert time.monotonic() - began < 5
    (line,) = _lines(errors)
    assert code == 2
    for word in ("pool.bytes", "need 2.1 MiB", "have 1.0 MiB", str(small_mount)):
        assert word in line, line
    assert list(small_mount.iterdir()) == []


def test_an_impossible_pool(tmp_path: Path) -> None:
    config = write_config(tmp_path, slots=100_000, pool_bytes="8MiB")
    code, errors = start_refused(config)
    (line,) = _lines(errors)
    assert (code, line.startswith("forestage: pool.bytes: ")) == (2, True)
    config = write_config(tmp_path)
    config.write_text(config.read_text().replace(f'path = "{tmp_path}/pool"', 'path = "/proc/forestage/pool"'))
    code, errors = start_refused(config)
    (line,) = _lines(errors)
    assert (code, line.startswith("forestage: pool.path: ")) == (2, True)


def test_a_storage_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = write_config(tmp_path, **{"storage.file": f'root = "{tmp_path}/file/l3"'})  # type: ignore[arg-type]
    code, errors = start_refused(config)
    (line,) = _lines(errors)
    assert (code, line.startswith("forestage: storage.file.root: cannot make ")) == (2, True)
    assert "Traceback" not in errors
