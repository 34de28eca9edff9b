"""KV events of a service process: it begins anew after a restart, and stops within its grace whoever listens."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from events.subscriber import Table, ask_again, subscribed
from forestage_client import AsyncClient, PoolView
from support.configs import write_config
from support.live import make_keys
from support.running import running, start_refused

PAGE = bytes(4096)


def _config(path: Path, more: str = "") -> Path:
    sockets = f'endpoint = "ipc://{path}/kv"\nreplay_endpoint = "ipc://{path}/again"'
    return write_config(path, events=f"publish = true\n{sockets}\n{more}")


async def _write(url: str, keys: list[bytes]) -> None:
    async with AsyncClient(url) as client:
        with PoolView((await client.pool()).path, writable=True) as view:
            async with client.write(view, "m", keys) as writer:
                for page in range(len(keys)):
                    writer.put("kv", page, PAGE)


async def _told(path: Path, keys: list[bytes]) -> list[int]:
    """Wait until what is replayed adds up to these pages; return the numbers."""
    async with asyncio.timeout(20):
        while True:
            table = Table()
            for message in await ask_again(f"ipc://{path}/again", 0):
                table.take(message)
            if table.blocks == {None: set(keys)}:
                return table.numbers


async def test_a_restart_begins_anew(tmp_path: Path) -> None:
    keys = make_keys(6)
    with running(_config(tmp_path)) as service:
        await _write(service.url, keys)
        first = await _told(tmp_path, keys)
        assert first[0] == 0
        assert len(first) >= 2
        assert service.stop() == 0
        assert any("publishing KV events at ipc://" in line for line in service.log)
    for clear in (True, False):
        with running(_config(tmp_path, f"clear = {str(clear).lower()}")):
            assert await _told(tmp_path, keys) == [0, 1][: 1 + clear]


async def test_it_stops_within_its_grace_while_somebody_listens(tmp_path: Path) -> None:
    with running(_config(tmp_path), "--grace", "5") as service:
        with subscribed(f"ipc://{tmp_path}/kv") as reading, subscribed(f"ipc://{tmp_path}/kv", hwm=1):
            await _write(service.url, make_keys(1))
            for number in range(50):
                await _write(service.url, make_keys(1, f"{number}"))
            await reading.next()
            began = time.monotonic()
            assert await asyncio.to_thread(service.stop) == 0
            assert time.monotonic() - began < 10
        assert not [line for line in service.log if "Traceback" in line or "error" in line.lower()]


def test_without_pyzmq_the_start_is_refused(tmp_path: Path) -> None:
    config = _config(tmp_path)
    without = "import sys; sys.modules['zmq'] = None; from forestage.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", without, "serve", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert 'events.publish: pip install "forestage[zmq]" first' in done.stderr
    assert "forestage ready" not in done.stdout


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1", "127.0.0.1:5557", "inproc://x", "tcp://127.0.0.1:5557 "])
def test_an_endpoint_that_is_none_is_a_mistake(tmp_path: Path, endpoint: str) -> None:
    code, said = start_refused(write_config(tmp_path, events=f'endpoint = "{endpoint}"'))
    assert (code, "events.endpoint: must be like tcp://127.0.0.1:5557" in said) == (2, True)


def test_nothing_is_imported_or_bound_by_default(tmp_path: Path) -> None:
    with running(write_config(tmp_path)) as service:
        maps = Path(f"/proc/{service.process.pid}/maps").read_text()
        assert "zmq" not in maps
