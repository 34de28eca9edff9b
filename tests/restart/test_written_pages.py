"""Pages that engines wrote, and the ends of the service: killed or stopped, whatever was committed comes to L3."""

import mmap
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2

from forestage.config import load
from support.live import content, make_keys
from support.running import Running, running

COMMITTED, OPEN, LATE = (make_keys(8, name) for name in ("committed", "open", "late"))

_CONFIG = """
[server]
port = 0
[pool]
path = "{folder}/pool"
bytes = "2MiB"
pin = "none"
[storage.file]
root = "{folder}/l3"
[[models]]
name = "m"
page_tokens = 16
[[models.components]]
name = "kv"
bytes = 4096
slots = 64
"""


def _ask(service: Running, method: str, path: str, body: object = None) -> Any:
    answer = httpx2.request(method, service.url + path, json=body, timeout=30)
    assert answer.status_code in {200, 201, 202, 204}, answer.text
    return answer.json() if answer.content else None


def _begin(service: Running, keys: Sequence[bytes]) -> Any:
    """Reserve slots and fill them, as an engine that maps the pool file."""
    write = _ask(service, "POST", "/v1/writes", {"model": "m", "keys": [key.hex() for key in keys]})
    pool = _ask(service, "GET", "/v1/pool")
    assert (write["instance"], write["generation"]) == (pool["instance"], pool["generation"])
    region = pool["regions"]["m"]["kv"]
    with open(pool["path"], "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for key, slot in zip(keys, write["slots"]["kv"], strict=True):
            at = region["offset"] + slot * region["slot_bytes"]
            memory[at : at + region["bytes"]] = content(key, "kv")
    return write


def _prefetch(service: Running, keys: Sequence[bytes]) -> Any:
    body = {"model": "m", "keys": [key.hex() for key in keys], "wait_ms": 20_000}
    return _ask(service, "POST", "/v1/prefetch", body)


def _slots(service: Running, state: str) -> int:
    text = httpx2.get(f"{service.url}/metrics").text
    series = f'forestage_pool_slots{{component="kv",model="m",state="{state}"}} '
    return next(int(float(line.removeprefix(series))) for line in text.splitlines() if line.startswith(series))


def _until(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_committed_pages_outlive_kill_and_stop(tmp_path: Path) -> None:
    config = tmp_path / "forestage.toml"
    config.write_text(_CONFIG.format(folder=tmp_path))
    (layout,) = load(str(config), {}).layouts()
    obstacle = tmp_path / "l3" / layout.fingerprint
    obstacle.parent.mkdir()
    obstacle.write_text("where a directory should be, L3 takes no page")

    with running(config) as service:
        write = _begin(service, COMMITTED)
        _ask(service, "POST", f"/v1/writes/{write['id']}/commit")
        _begin(service, OPEN)
        assert _ask(service, "GET", f"/v1/writes/{write['id']}?wait_ms=300")["durable"] == 0
        assert service.stop(signal.SIGKILL) == -signal.SIGKILL

    os.unlink(obstacle)
    with running(config) as service:
        assert _slots(service, "loading") == 8  # an engine may still be writing there
        assert _prefetch(service, COMMITTED)["pages"]["host"] == 8
        assert _prefetch(service, OPEN)["pages"]["ready"] == 0
        _until(lambda: _slots(service, "dirty") == 0)
        late = _begin(service, LATE)
        _ask(service, "POST", f"/v1/writes/{late['id']}/commit")
        assert service.stop() == 0  # within the grace all of it is written out

    os.unlink(tmp_path / "pool")
    with running(config) as service:
        for keys in (COMMITTED, LATE):
            job = _prefetch(service, keys)
            assert (job["pages"]["ready"], job["loaded"]) == (8, 8)  # the trailers vouch for the bytes
        assert service.stop() == 0
