"""kill -9 at random moments, again and again, under readers that stay attached: nothing wrong, nothing lost.

RESTART_ROUNDS=50 makes it fifty kills; RESTART_SEED repeats a run as far as time allows.
"""

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from forestage_client import Client, ForestageError, Gone, Prefetch
from forestage_client.pool_view import PoolView
from pool.conftest import end_of
from restart.lives import Lives
from restart.pages import COMPONENTS, MODEL, SLOTS, Store, page_bytes

ROUNDS = int(os.environ.get("RESTART_ROUNDS", "12"))
SEED = int(os.environ.get("RESTART_SEED", random.randrange(1 << 32)))
ENDS = ("load", "shutdown", "start", "load", "stop", "idle")

Reader = Callable[..., "subprocess.Popen[str]"]
# Per component: slot to key and generation.
Resident = dict[str, dict[int, tuple[bytes, int]]]


@pytest.fixture
def store(tmp_path: Path, shm: Path) -> Store:
    (shm / "own").mkdir()
    return Store.make(tmp_path, shm / "own" / "pool")


def resident(view: PoolView) -> Resident:
    """Return what a reader of the pool finds, having compared every byte of it."""
    found: Resident = {}
    for component in COMPONENTS:
        entries = [entry for entry in view.slots(MODEL, component) if entry.state == "resident"]
        found[component] = {entry.slot: (entry.key, entry.generation) for entry in entries}
        for entry in entries:
            assert view.copy(MODEL, component, entry.slot, entry.key) == page_bytes(entry.key, component)
    return found


def check_bytes(view: PoolView, job: Prefetch, keys: list[bytes]) -> None:
    """Compare every page that a job hands out."""
    for key, slot in zip(keys, job.slots["kv"], strict=False):
        assert view.copy(MODEL, "kv", slot, key) == page_bytes(key, "kv")
    (state,) = job.slots["state"]
    assert view.copy(MODEL, "state", state, keys[job.pages.ready - 1]) == page_bytes(keys[job.pages.ready - 1], "state")


@dataclass
class Load:
    """Threads that prefetch, read, release, cancel and leave, until the service is gone."""

    url: str
    store: Store
    view: PoolView
    seed: int
    failures: list[BaseException] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        for number in range(4):
            self.threads.append(threading.Thread(target=self._drive, args=(random.Random(self.seed + number),)))
            self.threads[-1].start()

    def join(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()
        assert self.failures == []

    def _drive(self, rng: random.Random) -> None:
        try:
            with Client(self.url) as client:
                while not self.over.is_set():
                    self._one(client, rng)
        except ForestageError:
            pass  # it was killed, or is stopping
        except BaseException as error:
            self.failures.append(error)

    def _one(self, client: Client, rng: random.Random) -> None:
        keys = rng.choice(self.store.chains)[: rng.randint(4, 32)]
        wait_ms, deadline_ms = rng.choice([(1000, 0), (1000, 8), (2, 0), (0, 0)])
        job = client.prefetch(MODEL, keys, wait_ms=wait_ms, deadline_ms=deadline_ms, lease_ms=1000)
        if job.lease is not None:
            check_bytes(self.view, job, keys)
            client.release(job.lease.id)
        elif rng.random() < 0.5:
            client.cancel(job.request_id)


def end_life(how: str, lives: Lives, load: Load, rng: random.Random) -> None:
    """End the service in one of the ways there are, most of them at a random moment."""
    if how == "idle":
        load.join()
    else:
        time.sleep(rng.uniform(0.01, 0.2))  # the moment
    if how == "stop":
        assert lives.stop() == 0
    else:
        if how == "shutdown":
            lives.signal(signal.SIGTERM)
            time.sleep(rng.uniform(0, 0.02))
        lives.kill()
    load.join()
    if how == "start":
        lives.begin(load.store.config)
        time.sleep(rng.uniform(0, 0.35))
        lives.kill()


def check_life(client: Client, view: PoolView, before: Resident, store: Store) -> None:
    """Check that everything that was whole is there again, and that all of the pool can be had."""
    assert resident(view) == before
    for key, _ in before["kv"].values():
        assert client.lookup(MODEL, [key]).pages.host == 1
    for keys in store.chains:
        found, there = client.lookup(MODEL, keys).pages, {key for key, _ in before["kv"].values()}
        assert found.host == next((i for i, key in enumerate(keys) if key not in there), len(keys))
        assert found.stored == len(keys)
    job = client.prefetch(MODEL, store.whole, wait_ms=30_000)
    assert (job.outcome, job.pages.ready, job.pages.requested) == ("complete", SLOTS, SLOTS)
    check_bytes(view, job, store.whole)
    assert job.lease is not None
    client.release(job.lease.id)


@pytest.mark.timeout(60 + 10 * ROUNDS)
def test_kills_at_any_moment_cost_no_page_and_show_no_wrong_byte(
    store: Store, lives: Lives, attach: Reader, sweep: Reader
) -> None:
    print(f"RESTART_SEED={SEED}")
    rng = random.Random(SEED)
    beside = store.pool.parent
    for name in ("pool~", ".pool", "pool.1", "pool.lock"):
        (beside / name).write_text(f"{name} is not ours")
    survived: Counter[str] = Counter()
    url = lives.start(store.config)
    inode = store.pool.stat().st_ino
    reader = attach("restart.reader_process", store.pool)
    readers = [reader, *(sweep(store.pool, MODEL, component, pause_ms=2) for component in COMPONENTS)]
    with PoolView(store.pool) as view:
        for number in range(ROUNDS):
            with Client(url) as client:
                held = client.prefetch(MODEL, store.chains[0][:8], wait_ms=30_000, lease_ms=600_000).lease
            assert held is not None
            load = Load(url, store, view, rng.randrange(1 << 32))
            load.start()
            end_life(ENDS[number % len(ENDS)], lives, load, rng)
            before, generation = resident(view), view.generation
            survived.update({name: len(slots) for name, slots in before.items()})
            url = lives.start(store.config)
            assert view.refresh()
            assert view.generation > generation
            assert store.pool.stat().st_ino == inode
            with Client(url) as client:
                told = client.pool()
                assert (told.instance, told.generation) == (view.instance, view.generation)
                with pytest.raises(Gone):
                    client.renew(held.id, 1000)
                check_life(client, view, before, store)
        with Client(url) as client:
            for keys in store.chains:  # no page of L3 was lost
                job = client.prefetch(MODEL, keys, wait_ms=30_000, lease_ms=1)
                assert job.outcome == "complete"
                client.cancel(job.request_id)
    assert lives.stop() == 0
    told_lines = lives.told("adopted the pool")
    assert len(told_lines) >= ROUNDS
    assert lives.told("is replaced") == []
    dropped = sum(int(line.rpartition(", ")[2].split()[0]) for line in told_lines)
    assert {file.name for file in beside.iterdir()} == {"pool", "pool~", ".pool", "pool.1", "pool.lock"}
    for name in ("pool~", ".pool", "pool.1", "pool.lock"):
        assert (beside / name).read_text() == f"{name} is not ours"
    for process in readers:
        status, out, complaints = end_of(process)
        assert (status, complaints) == (0, "")
        seen = json.loads(out)
        print(seen)
        assert (seen.get("wrong", 0), seen.get("falls", 0)) == (0, 0)
        assert seen["accepted"] > 100
        if process is reader:
            assert seen["starts"] >= ROUNDS
    print(f"{ROUNDS} rounds: {dict(survived)} pages survived, {dropped} half-filled slots were dropped")
    assert min(survived.values()) > 0
    assert dropped > 0
