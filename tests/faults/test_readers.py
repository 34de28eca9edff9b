"""Readers that come and go, however they end, do not take the pool with them (FAULTS S7)."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from faults.stored_pages import StoredPages
from forestage_client import Client
from forestage_client.pool_view import PoolView
from support.live import content, make_keys
from support.running import running

READER = Path(__file__).with_name("one_reader.py")
KEYS = make_keys(4)


def _reader(target: str, how: str) -> "subprocess.Popen[str]":
    command = [sys.executable, str(READER), target, how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _sweep(path: Path) -> int:
    with PoolView(str(path)) as view:
        resident = [entry for entry in view.slots("m", "kv") if entry.state == "resident"]
        for entry in resident:
            assert view.copy("m", "kv", entry.slot, entry.key) == content(entry.key, "kv")
        return len(resident)


def test_readers_of_all_kinds(tmp_path: Path) -> None:
    pages = StoredPages.make(tmp_path)
    pages.store([*KEYS, *make_keys(4, "more")])
    pool = tmp_path / "pool"
    with running(pages.config) as service, Client(service.url, timeout_s=20) as client:
        client.prefetch("m", KEYS, wait_ms=20_000)
        inode = pool.stat().st_ino
        readers = [_reader(str(pool), how) for how in ("exit", "leave", "raise", "kill") * 2]
        said = [reader.communicate(timeout=30)[0] for reader in readers]
        assert said == ["4\n"] * 8
        assert [reader.returncode for reader in readers] == [0, 0, 1, -9] * 2
        assert pool.stat().st_ino == inode
        assert client.prefetch("m", make_keys(4, "more"), wait_ms=20_000).outcome == "complete"
        assert _sweep(pool) == 8
        held = PoolView(str(pool))
        assert service.stop() == 0
    with held:  # still whole after the service has gone
        assert sum(entry.state == "resident" for entry in held.slots("m", "kv")) == 8
    assert not [line for line in service.log if "Traceback" in line]


@pytest.fixture
def shared() -> Iterator[Path]:
    descriptor, name = tempfile.mkstemp(prefix="forestage-test-", dir="/dev/shm")
    os.close(descriptor)
    os.unlink(name)
    yield Path(name)
    Path(name).unlink(missing_ok=True)


def test_a_reader_that_removes_the_file_is_noticed(tmp_path: Path, shared: Path) -> None:
    pages = StoredPages.make(tmp_path)
    text = pages.config.read_text().replace(f'path = "{tmp_path}/pool"', f'path = "{shared}"')
    pages.config.write_text(text)
    pages.store(KEYS)
    with running(pages.config) as service, Client(service.url, timeout_s=20) as client:
        client.prefetch("m", KEYS, wait_ms=20_000)
        # The standard library's resource tracker unlinks what its process attached to.
        naive = _reader(shared.name, "exit")
        naive.communicate(timeout=30)
        assert naive.returncode == 0
        if shared.exists():
            assert client.ready()
        else:
            gone = httpx2.get(f"{service.url}/readyz")
            assert (gone.status_code, gone.json()["type"]) == (503, "pool-unlinked")
            assert client.healthy()
        assert service.stop() == 0
