"""The example reader in C: the same pages as the Python reader, and the same refusals."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from forestage.pool.file import PoolFile, PoolSettings
from forestage_client.pool_view import PoolView, Stale
from pool.pages import DEMO, HYBRID, KV_BYTES, fill, key_of, payload

STALE = 3


@pytest.fixture
def pool(shm: Path) -> PoolFile:
    return PoolFile.create(PoolSettings(str(shm / "pool"), 4 << 20, pin="none"), (DEMO, HYBRID))


@pytest.fixture
def read(compiled: Path) -> Callable[..., tuple[int, bytes, str]]:
    """Run the example; return its status, output and complaints."""

    def run(*arguments: object) -> tuple[int, bytes, str]:
        done = subprocess.run([compiled / "pool_reader", *map(str, arguments)], capture_output=True, check=False)
        return done.returncode, done.stdout, done.stderr.decode()

    return run


Read = Callable[..., tuple[int, bytes, str]]


def test_it_reads_what_the_python_reader_reads(pool: PoolFile, read: Read) -> None:
    names = [("demo", "kv"), ("acme/hybrid", "kv"), ("acme/hybrid", "mamba")]
    with PoolView(pool.path) as view:
        for index, (model, component) in enumerate(names):
            last = pool.geometry.regions[index].slots - 1
            for slot, key in ((0, key_of(1)), (last, b"k" * 16), (1, b"K" * 64)):
                content = fill(pool, index, slot, key)
                assert view.copy(model, component, slot, key) == content
                assert read(pool.path, model, component, slot, key.hex()) == (0, content, "")
    pool.close()


def test_both_refuse_what_the_slot_does_not_hold(pool: PoolFile, read: Read) -> None:
    fill(pool, 0, 3, key_of(9))
    pool.tables[0].begin_fill(4)
    fill(pool, 0, 5, key_of(5))
    pool.tables[0].clear(5)
    fill(pool, 0, 6, key_of(6))  # looked up as such, and then
    fill(pool, 0, 6, key_of(7))
    fill(pool, 0, 7, key_of(10))
    pool.tables[0].begin_fill(7)
    asked = ((3, key_of(8)), (3, key_of(9)[:31]), (3, key_of(9) + b"\0"), (2, key_of(9)))
    with PoolView(pool.path) as view:
        for slot, key in (*asked, (4, key_of(4)), (5, key_of(5)), (6, key_of(6)), (7, key_of(10))):
            with pytest.raises(Stale):
                view.copy("demo", "kv", slot, key)
            assert read(pool.path, "demo", "kv", slot, key.hex()) == (STALE, b"", "pool_reader: stale\n")
    pool.close()


@pytest.mark.parametrize(
    "reuse", ["refilled", "refilled with the same page", "filling", "evicted", "adopted by a restart", "not at all"]
)
def test_a_slot_that_is_reused_in_mid_copy_is_stale(pool: PoolFile, compiled: Path, reuse: str) -> None:
    content = fill(pool, 1, 3, key_of(9))
    if reuse == "adopted by a restart":
        fill(pool, 1, 4, key_of(10))
    slot = 4 if reuse == "adopted by a restart" else 3
    key = key_of(10) if reuse == "adopted by a restart" else key_of(9)
    command = [str(compiled / "hammer"), "once", pool.path, "acme/hybrid", "kv", str(slot), key.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as reader:
        assert reader.stderr is not None
        assert reader.stderr.readline() == b"half\n"
        match reuse:
            case "refilled":
                fill(pool, 1, 3, key_of(1000))
            case "refilled with the same page":
                fill(pool, 1, 3, key_of(9))
            case "filling":
                pool.tables[1].begin_fill(3)
            case "evicted":
                pool.tables[1].clear(3)
            case "adopted by a restart":
                # Its page was being replaced when the service was killed; the next one drops it.
                pool.tables[1].begin_fill(4)
                pool.close()
                pool = PoolFile.create(PoolSettings(pool.path, 4 << 20, pin="none"), (DEMO, HYBRID))
        out, errors = reader.communicate(b"go on\n", timeout=30)
    if reuse == "not at all":
        assert (reader.returncode, out, errors) == (0, content, b"")
    else:
        assert (reader.returncode, out, errors) == (STALE, b"", b"pool_reader: stale\n")
    pool.close()


def test_it_refuses_what_is_not_a_pool_that_it_knows(pool: PoolFile, read: Read, shm: Path) -> None:
    fill(pool, 0, 0, key_of(0))
    key = key_of(0).hex()
    head = Path(pool.path).read_bytes()
    slots = pool.geometry.regions[0].slots
    refused = (1, b"", "pool_reader: no such pool, region or slot\n")
    for model, component, slot in (("demo", "mamba", 0), ("dem", "kv", 0), ("demo", "k", 0), ("demo", "kv", slots)):
        assert read(pool.path, model, component, slot, key) == refused
    damages = {"magic": (0, b"F0"), "version": (8, b"\2"), "size": (16, b"\1"), "starting": (160, b"\1")}
    for name, (at, content) in damages.items():
        (shm / name).write_bytes(head[:at] + content + head[at + len(content) :])
    (shm / "short").write_bytes(head[:100])
    for name in (*damages, "short", "nothing"):
        assert read(shm / name, "demo", "kv", 0, key) == refused
    for arguments in (
        (),
        (pool.path, "demo", "kv", 0),
        (pool.path, "demo", "kv", 0, "xy"),
        (pool.path, "demo", "kv", 0, ""),
    ):
        status, out, complaint = read(*arguments)
        assert (status, out, complaint[:6]) == (2, b"", "usage:")
    assert read(pool.path, "demo", "kv", 0, key) == (0, payload(key_of(0), KV_BYTES), "")
    pool.close()
