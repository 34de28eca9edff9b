"""kill -9 under engines that write and read: what was committed stays, what was called durable is in L3, byte for byte.

RESTART_ROUNDS=50 makes it fifty kills; RESTART_SEED repeats a run as far as time allows.
"""

import json
import os
import random
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from forestage_client import Client
from forestage_client.pool_view import PoolView
from pool.conftest import end_of
from restart.lives import Lives
from restart.load import Load, Prefetching, Resident, check_bytes, dropped, end_life, half_filled, resident
from restart.pages import COMPONENTS, MODEL, STATE_EVERY, Store
from restart.writing import Ledger, Writing

ROUNDS = int(os.environ.get("RESTART_ROUNDS", "6"))
SEED = int(os.environ.get("RESTART_SEED", random.randrange(1 << 32)))
# "away": killed while L3 takes nothing, so that what was committed is in the pool alone.
ENDS = ("load", "away", "shutdown", "filling", "start", "stop")
SLOTS, STATES = 192, 64
EXPIRE_MS = 1000

Reader = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def store(tmp_path: Path, shm: Path) -> Store:
    return Store.make(tmp_path, shm / "pool", slots=SLOTS, states=STATES, expire_ms=EXPIRE_MS)


def until(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def lent(view: PoolView) -> int:
    """Count the slots of the first component that engines may be writing to."""
    return sum(view.is_lent(MODEL, "kv", slot) for slot in range(SLOTS))


def num_dirty(client: Client) -> int:
    """Return how many pages L3 does not have yet."""
    return sum(int(float(n)) for n in re.findall(r'pool_slots{.*state="dirty"} (\S+)', client.metrics()))


def check_left(store: Store, before: Resident, ledger: Ledger) -> int:
    """Check what a dead service left; return how many committed pages are in the pool alone."""
    there = {(component, key) for component, slots in before.items() for key, _ in slots.values()}
    for component, key in ledger.durable:
        assert store.has(component, key)
    in_pool_alone = {place for place in ledger.committed if not store.has(*place)}
    assert in_pool_alone <= there
    return len(in_pool_alone)


def check_usable(client: Client, view: PoolView, store: Store) -> None:
    """Check that every slot can be had that no engine may be writing to."""
    job = client.prefetch(MODEL, store.whole, wait_ms=30_000)
    assert job.pages.ready == (SLOTS - lent(view)) // STATE_EVERY * STATE_EVERY
    check_bytes(view, job, store.whole)
    client.cancel(job.request_id)


def check_all_back(url: str, view: PoolView, store: Store) -> None:
    """Check that the slots that were lent when the service was killed are used again, once no engine can be writing."""
    until(lambda: lent(view) == 0)
    with Client(url) as client:
        check_usable(client, view, store)
        assert client.lookup(MODEL, store.whole).pages.host == SLOTS


@pytest.mark.timeout(90 + 15 * ROUNDS)
def test_kills_under_writes_lose_no_page_and_show_no_wrong_byte(
    store: Store, lives: Lives, attach: Reader, sweep: Reader
) -> None:
    print(f"RESTART_SEED={SEED}")
    rng, ledger, old = random.Random(SEED), Ledger(), Ledger()
    seen: Counter[str] = Counter()
    url = lives.start(store.config)
    inode = store.pool.stat().st_ino
    reader = attach("restart.reader_process", store.pool)
    readers = [reader, *(sweep(store.pool, MODEL, component, pause_ms=2) for component in COMPONENTS)]
    with PoolView(store.pool, writable=True) as view:
        for number in range(ROUNDS):
            end = ENDS[number % len(ENDS)]
            if end == "away":
                store.take_away()
            chains = [*store.chains, *old.chains[-16:]]
            writing, prefetching = Writing(ledger, view), Prefetching(chains, view)
            load = Load(url, (writing, writing, writing, prefetching, prefetching), rng.randrange(1 << 32))
            load.start()
            if end == "away":
                until(ledger.has_commits)
            end_life(end, lives, load, store, view, rng)
            store.bring_back()
            before, generation, half = resident(view), view.generation, half_filled(view)
            alone = check_left(store, before, ledger)
            assert not (end == "away" and alone == 0)
            assert not (end == "stop" and alone > 0)  # there was time to write all of it out
            seen.update(committed=len(ledger.committed), durable=len(ledger.durable), alone=alone, half=half)
            seen["most lent"] = max(seen["most lent"], lent(view))
            since = lives.log_end
            url = lives.start(store.config)
            assert view.refresh()
            assert view.generation > generation
            assert store.pool.stat().st_ino == inode
            assert dropped(lives, since) == [half]
            with Client(url) as client:
                assert resident(view) == before
                until(lambda: num_dirty(client) == 0)
                for place in ledger.committed:
                    assert store.has(*place)
                check_usable(client, view, store)
            old.committed |= ledger.committed
            old.chains += ledger.chains
            seen.update(abandoned=ledger.abandoned, dropped=ledger.dropped)
            ledger = Ledger(numbers=ledger.numbers)
            if (number + 1) % len(ENDS) == 0:
                check_all_back(url, view, store)
    assert lives.stop() == 0
    assert lives.told("is replaced") == []
    assert lives.told("Traceback") == []
    for place in old.committed:
        assert store.has(*place)
    print(f"{ROUNDS} rounds: {dict(seen)}")
    for process in readers:
        status, out, complaints = end_of(process)
        assert (status, complaints) == (0, "")
        found = json.loads(out)
        print(found)
        assert (found.get("wrong", 0), found.get("falls", 0)) == (0, 0)
        assert found["accepted"] > 100
