"""kill -9 at random moments, again and again, under readers that stay attached: nothing wrong, nothing lost.

RESTART_ROUNDS=50 makes it fifty kills; RESTART_SEED repeats a run as far as time allows.
"""

import json
import os
import random
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from forestage_client import Client, Gone
from forestage_client.pool_view import PoolView
from pool.conftest import end_of
from restart.lives import Lives
from restart.load import Load, Prefetching, Resident, check_bytes, dropped, end_life, half_filled, resident
from restart.pages import COMPONENTS, MODEL, SLOTS, Store

ROUNDS = int(os.environ.get("RESTART_ROUNDS", "12"))
SEED = int(os.environ.get("RESTART_SEED", random.randrange(1 << 32)))
ENDS = ("load", "shutdown", "start", "filling", "stop", "idle")

Reader = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def store(tmp_path: Path, shm: Path) -> Store:
    (shm / "own").mkdir()
    return Store.make(tmp_path, shm / "own" / "pool")


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
    num_dropped = 0
    url = lives.start(store.config)
    inode = store.pool.stat().st_ino
    reader = attach("restart.reader_process", store.pool)
    readers = [reader, *(sweep(store.pool, MODEL, component, pause_ms=2) for component in COMPONENTS)]
    with PoolView(store.pool) as view:
        for number in range(ROUNDS):
            with Client(url) as client:
                held = client.prefetch(MODEL, store.chains[0][:8], wait_ms=30_000, lease_ms=600_000).lease
            assert held is not None
            load = Load(url, [Prefetching(store.chains, view)] * 4, rng.randrange(1 << 32))
            load.start()
            end_life(ENDS[number % len(ENDS)], lives, load, store, view, rng)
            before, generation, half = resident(view), view.generation, half_filled(view)
            survived.update({name: len(slots) for name, slots in before.items()})
            since = lives.log_end
            url = lives.start(store.config)
            assert dropped(lives, since) == [half]  # the half-filled ones, and no other
            num_dropped += half
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
    assert len(lives.told("adopted the pool")) >= ROUNDS
    assert lives.told("is replaced") == []
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
    print(f"{ROUNDS} rounds: {dict(survived)} pages survived, {num_dropped} half-filled slots were dropped")
    assert min(survived.values()) > 0
    assert num_dropped >= ROUNDS // len(ENDS)  # at least in each round that ended so
