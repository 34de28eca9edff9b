"""Readers in processes of their own: never wrong bytes, and never the end of the pool."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from forestage.pool.file import PoolFile, PoolSettings
from forestage_client.pool_view import PoolView, Stale
from pool.conftest import Launcher, end_of
from pool.pages import DEMO, KV_BYTES, fill, key_of, payload

SECONDS = 1.5


def settings(shm: Path) -> PoolSettings:
    return PoolSettings(str(shm / "pool"), 4 << 20, pin="none")


@pytest.fixture
def pool(shm: Path) -> PoolFile:
    return PoolFile.create(settings(shm), (DEMO,))


def test_readers_never_accept_wrong_bytes_while_slots_are_recycled_and_services_come_and_go(
    shm: Path, launch: Launcher, sweep: Launcher
) -> None:
    pool = PoolFile.create(settings(shm), (DEMO,))
    readers = [launch("reader_process", pool.path, "recycle"), sweep(pool.path)]
    assert readers[0].stdout is not None
    assert readers[0].stdout.readline() == "attached\n"
    pages = [(key_of(number), payload(key_of(number), KV_BYTES)) for number in range(64)]
    number = fills = restarts = 0
    inode = os.stat(pool.path).st_ino
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        number += 1
        slot = number * 5 % 8
        pool.tables[0].begin_fill(slot)
        view = pool.shard_views(0, slot)[0]
        key, content = pages[number * 11 % 64]
        view[: KV_BYTES // 2] = content[: KV_BYTES // 2]
        if number % 7 == 0:
            pool.tables[0].clear(slot)  # a read that failed halfway
        elif number % 700 == 1:
            view.release()
            pool.close()  # a service that was killed halfway, and the next one
            pool = PoolFile.create(settings(shm), (DEMO,))
            assert [page.slot for page in pool.adopted[0] if page.slot == slot] == []
            restarts += 1
        else:
            view[KV_BYTES // 2 :] = content[KV_BYTES // 2 :]
            pool.tables[0].publish(slot, key)
            fills += 1
        if number % 50 == 0:
            # Give the readers pages that stay for a moment, or they would only ever come too late.
            time.sleep(0.001)
    assert os.stat(pool.path).st_ino == inode
    # As much as a busy machine lets come about in this time.
    assert fills > 300
    assert restarts > 0
    for reader in readers:
        status, out, complaints = end_of(reader)
        assert (status, complaints) == (0, "")
        seen = json.loads(out)
        assert seen.get("wrong", 0) == 0
        assert seen.get("falls", 0) == 0
        assert seen["accepted"] > 5
        assert seen["stale"] > 5
    pool.close()


def test_readers_never_accept_wrong_bytes_while_an_engine_writes_and_services_come_and_go(
    shm: Path, launch: Launcher, sweep: Launcher
) -> None:
    """An engine fills lent slots, whole or half, and goes on with one of them through restarts of the service."""
    pool = PoolFile.create(settings(shm), (DEMO,))
    readers = [launch("reader_process", pool.path, "recycle"), sweep(pool.path)]
    engine = launch("writer_process", pool.path)
    for process in (readers[0], engine):
        assert process.stdout is not None
        assert process.stdout.readline() == "attached\n"

    def write(how: str, slot: int, number: int) -> None:
        assert engine.stdin is not None
        assert engine.stdout is not None
        engine.stdin.write(f"{how} {slot} {number}\n")
        engine.stdin.flush()
        assert engine.stdout.readline() == "done\n"

    number = published = restarts = 0
    held = 7  # a slot whose write outlives the service that granted it
    resident: dict[int, bytes] = {}
    pool.tables[0].begin_fill(held, lent=True)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until or restarts < 3 or published < 100:
        number += 1
        slot = number * 5 % 7
        resident.pop(slot, None)
        pool.tables[0].begin_fill(slot, lent=True)
        write("half" if number % 2 else "scribble", slot, number)
        if number % 5 == 0:
            pool.tables[0].clear(slot)  # the engine has given it back
        elif number % 40 == 1:
            pool.close()  # the service was killed while both slots were lent
            pool = PoolFile.create(settings(shm), (DEMO,))
            assert pool.lent == [(0, lent) for lent in sorted((slot, held))]
            assert {page.slot: page.key for page in pool.adopted[0]} == resident
            for _ in range(3):
                write("scribble", slot, number)
                write("half", held, number)
            pool.tables[0].clear(slot)  # its time is over
            restarts += 1
        else:
            write("whole", slot, number)
            resident[slot] = key_of(number % 64)
            pool.tables[0].publish(slot, resident[slot], number, dirty=number % 3 == 0)
            published += 1
        if number % 50 == 0:
            time.sleep(0.001)
    assert end_of(engine)[0] == 0
    for reader in readers:
        status, out, complaints = end_of(reader)
        assert (status, complaints) == (0, "")
        seen = json.loads(out)
        assert seen.get("wrong", 0) == 0
        assert seen.get("falls", 0) == 0
        assert seen["accepted"] > 5
    pool.close()


def test_an_engine_killed_in_mid_write_leaves_a_slot_that_nobody_reads(shm: Path, launch: Launcher) -> None:
    pool = PoolFile.create(settings(shm), (DEMO,))
    content = fill(pool, 0, 0, key_of(0))
    engine = launch("writer_process", pool.path)
    assert engine.stdin is not None
    assert engine.stdout is not None
    assert engine.stdout.readline() == "attached\n"
    pool.tables[0].begin_fill(1, lent=True)
    engine.stdin.write("half 1 1\n")
    engine.stdin.flush()
    assert engine.stdout.readline() == "done\n"
    engine.kill()
    assert engine.wait(timeout=30) == -signal.SIGKILL
    with PoolView(pool.path) as view:
        assert [entry.state for entry in view.slots("demo", "kv")][:3] == ["resident", "filling", "free"]
        with pytest.raises(Stale):
            view.copy("demo", "kv", 1, key_of(1))
        assert view.copy("demo", "kv", 0, key_of(0)) == content
    pool.close()


@pytest.mark.parametrize("how", ["normal", "error", "kill"])
def test_a_reader_that_ends_leaves_the_pool(pool: PoolFile, launch: Launcher, how: str) -> None:
    content = fill(pool, 0, 0, key_of(0))
    for _ in range(3):
        reader = launch("reader_process", pool.path, "wait" if how == "kill" else how)
        assert reader.stdout is not None
        assert reader.stdout.readline() == "attached\n"
        if how == "kill":
            reader.kill()
        status, out, complaints = end_of(reader)
        if how == "normal":
            assert (status, out, complaints) == (0, f"{KV_BYTES}\n", "")
        elif how == "error":
            assert status == 1
            assert complaints.endswith("LookupError: the reader's own error\n")
            assert "BufferError" not in complaints
        else:
            assert status == -signal.SIGKILL
        assert pool.is_linked()
    with PoolView(pool.path) as view:
        assert view.copy("demo", "kv", 0, key_of(0)) == content
        fill(pool, 0, 1, key_of(1))
        assert view.copy("demo", "kv", 1, key_of(1)) == payload(key_of(1), KV_BYTES)
    pool.close()


def test_a_reader_outlives_the_service(pool: PoolFile, launch: Launcher) -> None:
    fill(pool, 0, 0, key_of(0))
    reader = launch("reader_process", pool.path, "wait")
    assert reader.stdout is not None
    assert reader.stdout.readline() == "attached\n"
    pool.close()
    assert end_of(reader) == (0, f"{KV_BYTES}\n", "")
    with PoolView(pool.path) as view:
        assert view.copy("demo", "kv", 0, key_of(0)) == payload(key_of(0), KV_BYTES)
