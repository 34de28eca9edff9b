"""SIGTERM and SIGINT in every situation: callers get answers, the exit code is 0, and it does not take long (S9)."""

import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from faults.stored_pages import StoredPages
from forestage_client import Client
from forestage_client.pool_view import PoolView
from support.live import content, make_keys
from support.running import Running, refusing, running

KEYS = make_keys(8)
GRACE_S = 3.0
SLOW_S = 1.0  # a machine that others use as well may take so much longer over everything


def _until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def _exit(service: Running, within_s: float) -> float:
    """Wait for the end, which must be a good one; return how long it took."""
    began = time.monotonic()
    assert service.process.wait(within_s + SLOW_S) == 0
    return time.monotonic() - began


def _no_traceback(service: Running) -> None:
    assert not [line for line in service.log if "Traceback" in line]


def test_eight_jobs_are_held(tmp_path: Path) -> None:
    pages = StoredPages.make(tmp_path, storage="stall_timeout_ms = 60000")
    chains = [KEYS[:4], *(make_keys(4, f"chain {i}") for i in range(8))]
    for keys in chains:
        pages.store(keys)
    with pages.serving("--grace", str(GRACE_S)) as service, Client(service.url, timeout_s=20) as client:
        done = client.prefetch("m", chains[0], wait_ms=5000)
        view = PoolView(str(tmp_path / "pool"))
        idle = socket.create_connection(("127.0.0.1", service.port))
        for keys in chains[1:]:
            pages.hang(keys[2:])
        for i, keys in enumerate(chains[1:5]):
            client.prefetch("m", keys, request_id=f"not-waiting-{i}")
        with ThreadPoolExecutor(4) as callers:
            asked = [
                callers.submit(client.prefetch, "m", keys, request_id=f"waiting-{i}", wait_ms=15_000)
                for i, keys in enumerate(chains[5:])
            ]
            _until(lambda: client.metrics().count('forestage_jobs{state="loading"} 8') == 1)
            sent = time.monotonic()
            service.process.send_signal(signal.SIGTERM)
            _until(lambda: httpx2.get(f"{service.url}/readyz").status_code == 503, 1)
            refused = httpx2.post(f"{service.url}/v1/prefetch", json={"model": "m", "keys": [KEYS[0].hex()]})
            assert (refused.status_code, refused.json()["type"]) == (503, "stopping")
            assert int(refused.headers["retry-after"]) >= 1
            assert httpx2.get(f"{service.url}/healthz").status_code == 200
            answers = [answer.result(5) for answer in asked]
        assert time.monotonic() - sent < 1.5  # they do not wait for what hangs
        for answer in answers:
            assert answer.done
            assert answer.pages.ready + answer.shortfall["shutdown"] == answer.pages.granted == 4
        assert service.process.poll() is None
        time.sleep(max(0.0, 1.0 - (time.monotonic() - sent)))
        pages.release()
        _exit(service, GRACE_S + 1 - (time.monotonic() - sent))
        idle.close()
        with view:  # the reader's map is as good as before
            for key, slot in zip(chains[0], done.slots["kv"], strict=True):
                assert view.copy("m", "kv", slot, key) == content(key, "kv")
            resident = [entry for entry in view.slots("m", "kv") if entry.state == "resident"]
            for entry in resident:
                assert view.copy("m", "kv", entry.slot, entry.key) == content(entry.key, "kv")
        assert Path(view.path).exists()
    _no_traceback(service)


def test_reads_that_hang_for_good(tmp_path: Path) -> None:
    pages = StoredPages.make(tmp_path)
    pages.store(KEYS)
    pages.hang(KEYS)
    pages.hang(make_keys(1, "lost"), "lost")
    with pages.serving("--grace", "1") as service, Client(service.url) as client:
        client.prefetch("m", KEYS, request_id="r")
        client.prefetch("m", make_keys(1, "lost"), request_id="lost")
        _until(lambda: client.get_prefetch("r").state == "loading")
        service.process.send_signal(signal.SIGTERM)
        # How long depends on whether a read had begun to hang when the signal came; it must end in any case.
        _exit(service, 2.0)
    _no_traceback(service)


def test_a_second_signal_ends_the_grace(tmp_path: Path) -> None:
    pages = StoredPages.make(tmp_path)
    pages.store(KEYS)
    pages.hang(KEYS)
    with pages.serving("--grace", "60") as service, Client(service.url) as client:
        client.prefetch("m", KEYS, request_id="r")
        _until(lambda: client.get_prefetch("r").state == "loading")
        service.process.send_signal(signal.SIGTERM)
        _until(lambda: not client.ready())
        assert service.process.poll() is None
        service.process.send_signal(signal.SIGTERM)
        _exit(service, 2.0)
    _no_traceback(service)


def test_a_request_that_never_comes_whole(tmp_path: Path) -> None:
    pages = StoredPages.make(tmp_path)
    head = b"POST /v1/prefetch HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    for grace_s, second in ((1, False), (60, True)):
        with running(pages.config, "--grace", str(grace_s)) as service:
            slow = socket.create_connection(("127.0.0.1", service.port))
            slow.sendall(head)
            service.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            assert service.process.poll() is None
            if second:
                service.process.send_signal(signal.SIGTERM)
            _exit(service, 1.5)
            slow.close()
        _no_traceback(service)


def test_no_grace_at_all(tmp_path: Path) -> None:
    pages = StoredPages.make(tmp_path)
    pages.store(KEYS)
    pages.hang(KEYS)
    with pages.serving("--grace", "0") as service, Client(service.url) as client:
        client.prefetch("m", KEYS, request_id="r")
        _until(lambda: client.get_prefetch("r").state == "loading")
        service.process.send_signal(signal.SIGINT)
        _exit(service, 1.0)
    _no_traceback(service)


def test_an_idle_service_and_many_signals(tmp_path: Path) -> None:
    pages = StoredPages.make(tmp_path)
    with running(pages.config) as service:
        began = time.monotonic()
        while service.process.poll() is None:  # to the very last moment of the process
            service.process.send_signal(signal.SIGTERM)
            time.sleep(0.001)
        assert service.process.returncode == 0
        assert time.monotonic() - began < 2
    _no_traceback(service)


def _catches_signals(process: "subprocess.Popen[str]") -> bool:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    caught = int(next(line for line in lines if line.startswith("SigCgt")).split()[1], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("seed", range(4))
def test_a_signal_during_the_start(tmp_path: Path, seed: int) -> None:
    randomness = random.Random(seed)
    signum = (signal.SIGTERM, signal.SIGINT)[seed % 2]
    config = StoredPages.make(tmp_path, server=f'port = 0\nuds = "{tmp_path}/s"').config
    with refusing(config) as process:
        _until(lambda: _catches_signals(process))
        time.sleep(randomness.uniform(0, 1.0))
        process.send_signal(signum)
        said, log = process.communicate(timeout=5)
    assert process.returncode == 0, log
    assert "Traceback" not in log
    assert said in ("", *[line for line in [said] if line.startswith("forestage ready ")])
    assert not (tmp_path / "s").exists()


def test_a_signal_while_a_large_pool_is_prefaulted(tmp_path: Path) -> None:
    pages = StoredPages.make(tmp_path)
    text = pages.config.read_text().replace("64MiB", "8GiB").replace("slots = 64", "slots = 1000000")
    pages.config.write_text(text.replace(f'path = "{tmp_path}/pool"', f'path = "/dev/shm/{tmp_path.name}/pool"'))
    pool = Path(f"/dev/shm/{tmp_path.name}/pool")
    with refusing(pages.config) as process:
        _until(lambda: any(Path(f"/dev/shm/{tmp_path.name}").glob("*")))
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        said, log = process.communicate(timeout=10)
    assert (process.returncode, said) == (0, ""), log
    assert time.monotonic() - began < 2
    assert "Traceback" not in log
    assert not pool.parent.exists()  # nothing is left behind
