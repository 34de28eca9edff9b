"""Readers in processes of their own: never wrong bytes, and never the end of the pool."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from forestage.pool.file import PoolFile, PoolSettings
from forestage_client.pool_view import PoolView
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
