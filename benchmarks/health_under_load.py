"""How long `/healthz` takes while the service reads at full speed; prints one row a page size.

The service runs as a process of its own; 1 GiB is read from files by default, again and again, while the probe asks.
"""

import argparse
import asyncio
import hashlib
import http.client
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from forestage.config import load
from forestage.storage.files import FileStorage
from forestage_client import Client

_COUNTS = ("page", "probes")
_CONFIG = """
[server]
port = 0
[pool]
path = "{folder}/pool"
bytes = "{pool}"
pin = "none"
[storage.file]
root = "{folder}/l3"
[[models]]
name = "m"
page_tokens = 64
[[models.components]]
name = "kv"
bytes = {page}
slots = {slots}
"""


def _keys(count: int, chain: int) -> list[bytes]:
    return [hashlib.sha256(f"{chain}|{i}".encode()).digest() for i in range(count)]


async def _fill(config: Path, keys: list[bytes], page: int) -> None:
    layout = load(str(config), {}).layouts()[0]
    storage = FileStorage(config.parent / "l3")
    await storage.open()
    payload = bytes(range(256)) * (page // 256)
    for at in range(0, len(keys), 64):
        await asyncio.gather(*(storage.write(layout, 0, key, [payload]) for key in keys[at : at + 64]))
    await storage.aclose()


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def _probe(port: int, stop: threading.Event, spans: list[float]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    while not stop.is_set():
        began = time.perf_counter()
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        answer.read()
        spans.append((time.perf_counter() - began) * 1e3)
        assert answer.status == 200
        time.sleep(0.002)
    connection.close()


def _measure(page: int, total: int, rounds: int, folder: Path) -> dict[str, float]:
    count = total // page
    config = folder / "forestage.toml"
    config.write_text(_CONFIG.format(folder=folder, pool=total + (64 << 20), page=page, slots=count))
    keys = _keys(count, 0)
    asyncio.run(_fill(config, keys, page))
    command = [sys.executable, "-m", "forestage", "serve", "--config", str(config), "--log-level", "error"]
    service = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert service.stdout is not None
        url = service.stdout.readline().split()[2]
        port = int(url.rpartition(":")[2])
        idle: list[float] = []
        busy: list[float] = []
        rates: list[float] = []
        with Client(url) as client:
            stop = threading.Event()
            thread = threading.Thread(target=_probe, args=(port, stop, idle))
            thread.start()
            time.sleep(1.0)
            stop.set()
            thread.join()
            for turn in range(rounds):
                stop = threading.Event()
                thread = threading.Thread(target=_probe, args=(port, stop, busy))
                began = time.perf_counter()
                thread.start()
                job = client.prefetch("m", keys, request_id=f"r{turn}", wait_ms=120_000)
                stop.set()
                thread.join()
                rates.append(total / (time.perf_counter() - began) / 1e9)
                assert (job.outcome, job.loaded) == ("complete", count), job
                client.cancel(job.request_id)
                _evict(client, config, count)
        return {
            "page": page,
            "GB/s": statistics.median(rates),
            "idle p50": _percentile(idle, 0.5),
            "idle p99": _percentile(idle, 0.99),
            "busy p50": _percentile(busy, 0.5),
            "busy p99": _percentile(busy, 0.99),
            "busy max": max(busy),
            "probes": len(busy),
        }
    finally:
        service.terminate()
        service.wait(20)


def _evict(client: Client, config: Path, count: int) -> None:
    """Fill the pool with other pages, so that the next round reads again."""
    others = _keys(count, 1)
    root = config.parent / "l3"
    if not (root / "evicted").exists():
        layout = load(str(config), {}).layouts()[0]
        page = layout.components[0].bytes

        async def write() -> None:
            storage = FileStorage(root)
            payload = b"\1" * page
            for at in range(0, count, 64):
                await asyncio.gather(*(storage.write(layout, 0, key, [payload]) for key in others[at : at + 64]))
            await storage.aclose()

        asyncio.run(write())
        (root / "evicted").touch()
    job = client.prefetch("m", others, wait_ms=120_000)
    assert job.outcome == "complete", job
    client.cancel(job.request_id)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="MiB to read in a round")
    parser.add_argument("--pages", type=int, nargs="+", default=[64, 1024], help="page sizes in KiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where files and pool lie")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for kib in arguments.pages:
        folder = Path(tempfile.mkdtemp(prefix="forestage-bench-", dir=arguments.folder))
        try:
            rows.append(_measure(kib << 10, arguments.mib << 20, arguments.rounds, folder))
        finally:
            shutil.rmtree(folder)
    if arguments.json:
        print(json.dumps(rows))
        return
    print(f"/healthz in ms while {arguments.mib} MiB are read from files, {arguments.rounds} rounds")
    print("   ".join(f"{name:>9}" for name in rows[0]))
    for row in rows:
        print("   ".join(f"{value:>9.0f}" if name in _COUNTS else f"{value:>9.2f}" for name, value in row.items()))


if __name__ == "__main__":
    main()
