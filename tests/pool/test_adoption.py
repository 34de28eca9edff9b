"""Starts on the file of an earlier life: adopted page by page, or replaced with a word why; and kills in between."""

import errno
import json
import logging
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from forestage.core.errors import StartError
from forestage.core.layout import Component, ModelLayout
from forestage.pool import blueprint as blueprint_module
from forestage.pool.file import PoolFile, PoolSettings
from forestage.pool.limits import Roots
from forestage.pool.table import AdoptedPage
from forestage_client.pool_view import PoolView, Stale
from pool.conftest import Launcher, Mounter, end_of
from pool.moments import moments
from pool.owner_process import NOBODY
from pool.pages import DEMO, HYBRID, KV_BYTES, fill, key_of, payload

MIB = 1 << 20
HYBRID_KV, HYBRID_STATE = 1, 2  # indexes of regions
TINY = ModelLayout("tiny", 1, (Component("kv", 64, slots=4),))


def settings(path: Path, size: int = 4 * MIB, **others: str | int) -> PoolSettings:
    return replace(PoolSettings(str(path), size, pin="none"), **others)  # type: ignore[arg-type]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the pool has said about adopting since the last call."""
    told = [message for message in caplog.messages if message.startswith(("adopted", "the pool at"))]
    caplog.clear()
    return told


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forestage.pool")


def test_what_was_whole_stays_and_everything_else_becomes_free(shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = shm / "pool"
    models = (DEMO, HYBRID)
    first = PoolFile.create(settings(path), models)
    assert first.adopted == [[], [], []]
    contents = {
        (index, slot): fill(first, index, slot, key_of(slot), page=slot + 100, dirty=slot == 4)
        for index, slot in ((0, 0), (0, 3), (0, 7), (HYBRID_KV, 2), (HYBRID_STATE, 4))
    }
    first.tables[0].begin_fill(5)
    first.tables[0].begin_fill(7)  # half of another page
    first.shard_views(0, 7)[0][: KV_BYTES // 2] = bytes(KV_BYTES // 2)
    first.tables[HYBRID_KV].clear(2)
    inode, mode = path.stat().st_ino, path.stat().st_mode
    with PoolView(path) as reader:
        stamps = {slot: reader.stamp("demo", "kv", slot, key_of(slot)) for slot in (0, 3)}
        assert not reader.refresh()
        first.close()
        second = PoolFile.create(settings(path), models)
        assert lines(caplog) == [f"adopted the pool at {path}: 3 pages kept, 2 dropped"]
        assert (path.stat().st_ino, path.stat().st_mode) == (inode, mode)
        assert (second.generation, second.instance != first.instance) == (2, True)
        assert second.adopted == [
            [AdoptedPage(0, key_of(0), 100, False), AdoptedPage(3, key_of(3), 103, False)],
            [],
            [AdoptedPage(4, key_of(4), 104, True)],
        ]
        # The reader's map is that of the new life too: what it stamped is still true, and it sees the start.
        assert reader.generation == 1
        assert reader.refresh()
        assert (reader.generation, reader.instance) == (2, second.instance)
        assert not reader.refresh()
        for slot, stamp in stamps.items():
            reader.check(stamp)
            assert reader.copy("demo", "kv", slot, key_of(slot)) == contents[0, slot]
        assert reader.copy("acme/hybrid", "mamba", 4, key_of(4)) == contents[HYBRID_STATE, 4]
        for slot in (5, 7):
            with pytest.raises(Stale):
                reader.copy("demo", "kv", slot, key_of(slot))
        assert {e.slot: e.state for e in reader.slots("demo", "kv") if e.state != "free"} == dict.fromkeys(
            (0, 3), "resident"
        )
        second.tables[HYBRID_STATE].set_clean(4)
        fill(second, 0, 3, key_of(30))
        with pytest.raises(Stale):
            reader.check(stamps[3])
        second.close()
        third = PoolFile.create(settings(path), models)
        assert third.adopted[HYBRID_STATE] == [AdoptedPage(4, key_of(4), 104, False)]
        assert [(page.slot, page.key) for page in third.adopted[0]] == [(0, key_of(0)), (3, key_of(30))]
        third.close()


def test_a_reader_that_copies_while_its_slot_is_dropped_finds_out(shm: Path) -> None:
    path = shm / "pool"
    first = PoolFile.create(settings(path), (DEMO,))
    fill(first, 0, 0, key_of(0))
    with PoolView(path) as reader:
        stamp = reader.stamp("demo", "kv", 0, key_of(0))
        first.tables[0].begin_fill(0)
        first.close()
        PoolFile.create(settings(path), (DEMO,)).close()
        with pytest.raises(Stale, match="reused"):
            reader.check(stamp)


def test_a_start_that_is_killed_while_it_takes_over_loses_nothing(shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Cut the taking over off at every moment, start again on what is left: always adopted, always the same pages."""
    path = shm / "pool"
    first = PoolFile.create(settings(path, MIB), (TINY,))
    fill(first, 0, 0, key_of(0))
    fill(first, 0, 1, key_of(1))
    first.tables[0].begin_fill(1)
    fill(first, 0, 2, key_of(2), page=9, dirty=True)
    first.tables[0].begin_fill(3, lent=True)
    first.close()
    inode = path.stat().st_ino
    expected = [AdoptedPage(0, key_of(0), 0, False), AdoptedPage(2, key_of(2), 9, True)]

    class Live:
        """The file as it is at the time."""

        def __bytes__(self) -> bytes:
            return path.read_bytes()

    def start() -> PoolFile:
        pool = PoolFile.create(settings(path, MIB), (TINY,))
        assert (pool.adopted[0], pool.lent) == (expected, [(0, 3)])
        assert path.stat().st_ino == inode
        return pool

    seen = moments(Live(), lambda: start().close())
    assert len(seen) > 15
    for look in seen:
        with open(path, "r+b") as file:
            file.write(look)
        before = int.from_bytes(look[152:160], "little")
        pool = start()
        assert pool.generation == before + 1 in {2, 3}
        pool.close()
    assert not any("replaced" in line for line in lines(caplog))


def test_slots_lent_to_an_engine_stay_lent_through_every_restart(shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = shm / "pool"
    models = (DEMO, HYBRID)
    first = PoolFile.create(settings(path), models)
    fill(first, 0, 0, key_of(0), page=5, dirty=True)
    fill(first, 0, 1, key_of(1), page=6)
    first.tables[0].begin_fill(2)
    first.tables[0].begin_fill(3, lent=True)
    first.tables[HYBRID_STATE].begin_fill(4, lent=True)
    first.tables[HYBRID_STATE].begin_fill(1, lent=True)
    first.tables[HYBRID_STATE].publish(1, key_of(1), page=1, dirty=True)
    first.tables[0].begin_fill(6, lent=True)
    first.tables[0].clear(6)
    lent = [(0, 3), (HYBRID_STATE, 4)]
    pages = [
        [AdoptedPage(0, key_of(0), 5, True), AdoptedPage(1, key_of(1), 6, False)],
        [],
        [AdoptedPage(1, key_of(1), 1, True)],
    ]
    region = first.geometry.regions[0]
    first.close()
    with open(path, "r+b") as engine:
        for dropped in (1, 0):
            pool = PoolFile.create(settings(path), models)
            assert lines(caplog) == [
                f"adopted the pool at {path}: 3 pages kept, {dropped} dropped, 2 may still be written by engines"
            ]
            assert (pool.adopted, pool.lent) == (pages, lent)
            # The engine goes on writing, and no reader takes that for a page.
            engine.seek(region.offset + 3 * KV_BYTES)
            engine.write(payload(key_of(3), KV_BYTES // 2))
            engine.flush()
            with PoolView(path) as reader:
                entry = next(entry for entry in reader.slots("demo", "kv") if entry.slot == 3)
                assert (entry.state, entry.key) == ("filling", b"")
                with pytest.raises(Stale):
                    reader.stamp("demo", "kv", 3, key_of(3))
            pool.close()
    pool = PoolFile.create(settings(path), models)
    lines(caplog)
    for index, slot in pool.lent:
        pool.tables[index].clear(slot)
    assert fill(pool, 0, 3, key_of(30)) == payload(key_of(30), KV_BYTES)
    pool.tables[0].set_clean(0)
    pool.close()
    pool = PoolFile.create(settings(path), models)
    assert lines(caplog) == [f"adopted the pool at {path}: 4 pages kept, 0 dropped"]
    assert pool.lent == []
    assert pool.adopted[0] == [
        AdoptedPage(0, key_of(0), 5, False),
        AdoptedPage(1, key_of(1), 6, False),
        AdoptedPage(3, key_of(30), 0, False),
    ]
    pool.close()


OTHER_DTYPE = replace(DEMO, dtype="float16")
OTHER_SLOTS = ModelLayout("demo", 64, (Component("kv", KV_BYTES, slots=8),))


@pytest.mark.parametrize(
    ("size", "models", "why"),
    [
        (4 * MIB, (HYBRID,), "it was made for another layout, from acme/hybrid/kv on"),
        (4 * MIB, (OTHER_DTYPE,), "it was made for another layout, from demo/kv on"),
        (4 * MIB, (OTHER_SLOTS,), "it was made for another layout, from demo/kv on"),
        (3 * MIB, (DEMO,), "it was made for another layout, from demo/kv on"),
        (4 * MIB, (OTHER_SLOTS, HYBRID), "it was made for another layout, from demo/kv on"),
    ],
)
def test_another_layout_gets_a_new_file(
    shm: Path, caplog: pytest.LogCaptureFixture, size: int, models: tuple[ModelLayout, ...], why: str
) -> None:
    path = shm / "pool"
    first = PoolFile.create(settings(path), (DEMO,))
    content = fill(first, 0, 3, key_of(3))
    with PoolView(path) as reader:
        first.close()
        second = PoolFile.create(settings(path, size), models)
        assert lines(caplog) == [f"the pool at {path} is replaced, and its pages are gone: {why}"]
        assert (second.generation, sum(map(len, second.adopted))) == (2, 0)
        # The reader's map is still that of the first file, and it can tell.
        assert reader.copy("demo", "kv", 3, key_of(3)) == content
        assert not reader.refresh()
        assert reader.instance != second.instance
    second.close()


def test_fewer_models_are_another_layout(shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = shm / "pool"
    PoolFile.create(settings(path), (OTHER_SLOTS, TINY)).close()
    PoolFile.create(settings(path), (OTHER_SLOTS,)).close()
    PoolFile.create(settings(path), (OTHER_SLOTS, TINY)).close()
    assert [line.rpartition(": ")[2] for line in lines(caplog)] == [
        "it was made for another layout, from demo/kv on",  # one record less moves everything behind the records
        "it was made for another layout, from demo/kv on",
    ]


def scribble(at: int, content: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(content)

    return change


def size_of(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size if size >= 0 else path.stat().st_size + size)


def copied(path: Path) -> None:
    shutil.copy2(path, path.parent / "copy")
    os.rename(path.parent / "copy", path)


NOISE = bytes(range(1, 256)) * 33


# What happened to the file, what is told, and the generation of the fifth start: counted on where that can be read.
DAMAGES: dict[str, tuple[Callable[[Path], None], str, int]] = {
    "emptied": (size_of(0), "it is empty", 1),
    "cut in the magic": (size_of(3), "the header is cut short", 1),
    "cut behind the magic": (size_of(8), "the header is cut short", 1),
    "cut in the header": (size_of(200), "the header is cut short", 1),
    "cut behind the header": (size_of(4096), "the header is damaged: impossible sizes", 5),
    "cut behind the records": (size_of(4096 + 256), "it has 4352 bytes, its header says 4145152", 5),
    "cut by a page": (size_of(-4096), "it has 4141056 bytes, its header says 4145152", 5),
    "grown": (size_of(8 * MIB), "it has 8388608 bytes, its header says 4145152", 5),
    "magic": (scribble(0, NOISE[:8]), "its header was overwritten", 5),
    "start of the header": (scribble(0, NOISE[:64]), "its header was overwritten", 5),
    "header": (scribble(0, NOISE[:4096]), "its header was overwritten", 1),
    "header and records": (scribble(0, NOISE[:8192]), "its header was overwritten", 1),
    "version": (scribble(8, b"\1"), "format version 1, this service writes 3", 5),
    "size": (scribble(16, b"\xff"), "the header is damaged: its checksum does not agree", 5),
    "inode": (scribble(40, b"\xff"), "the header is damaged: its checksum does not agree", 5),
    "generation": (scribble(128, NOISE[:8]), "the header is damaged: impossible generation", 1),
    "record": (scribble(4096 + 130, b"!"), "the header is damaged: its checksum does not agree", 5),
    "table": (scribble(8192 + 128, b"\xff" * 128), "the slot table of demo/kv is damaged", 5),
    "copied": (copied, "it is a copy of a pool", 5),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_not_what_it_was_is_replaced(shm: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    change, why, generation = DAMAGES[damage]
    path = shm / "pool"
    for _ in range(4):
        PoolFile.create(settings(path), (DEMO,)).close()
    assert len(lines(caplog)) == 3
    change(path)
    (shm / "pool.bak").write_text("not ours")
    pool = PoolFile.create(settings(path), (DEMO,))
    assert lines(caplog) == [f"the pool at {path} is replaced, and its pages are gone: {why}"]
    assert (pool.generation, pool.adopted) == (generation, [[]])
    fill(pool, 0, 1, key_of(1))
    pool.close()
    assert {file.name for file in shm.iterdir()} == {"pool", "pool.bak"}
    PoolFile.create(settings(path), (DEMO,)).close()
    assert lines(caplog) == [f"adopted the pool at {path}: 1 pages kept, 0 dropped"]


def test_scribbled_entries_are_dropped_and_the_others_stay(shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = shm / "pool"
    pool = PoolFile.create(settings(path), (DEMO,))
    for slot in range(6):
        fill(pool, 0, slot, key_of(slot))
    at = pool.geometry.regions[0].table_offset
    pool.close()
    scribble(at + 2 * 128 + 8, NOISE[:120])(path)
    scribble(at + 4 * 128 + 40, b"\0\0\0")(path)
    pool = PoolFile.create(settings(path), (DEMO,))
    assert lines(caplog) == [f"adopted the pool at {path}: 4 pages kept, 2 dropped"]
    assert [page.slot for page in pool.adopted[0]] == [0, 1, 3, 5]
    pool.close()


def test_a_second_service_changes_nothing(shm: Path) -> None:
    path = shm / "pool"
    first = PoolFile.create(settings(path, MIB), (TINY,))
    fill(first, 0, 0, key_of(0))
    first.tables[0].begin_fill(1)
    before = path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino
    for other in (settings(path, MIB), settings(path, 2 * MIB), settings(path, MIB, mode=0o600)):
        with pytest.raises(StartError, match="is in use by another running service"):
            PoolFile.create(other, (TINY,))
    assert (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) == before
    first.close()


def test_a_stop_while_an_adopted_file_is_backed_leaves_it_as_it_was(shm: Path) -> None:
    path = shm / "pool"
    first = PoolFile.create(settings(path, MIB), (TINY,))
    fill(first, 0, 0, key_of(0))
    first.tables[0].begin_fill(1)
    first.close()
    before = path.read_bytes(), path.stat().st_ino, path.stat().st_mode

    def stop(done: int, total: int) -> None:
        raise InterruptedError("SIGTERM")

    with pytest.raises(InterruptedError):
        PoolFile.create(settings(path, MIB, mode=0o600), (TINY,), stop)
    assert (path.read_bytes(), path.stat().st_ino, path.stat().st_mode) == before
    pool = PoolFile.create(settings(path, MIB), (TINY,))
    assert len(pool.adopted[0]) == 1
    pool.close()


def test_pinning_that_fails_costs_no_page(shm: Path, launch: Launcher) -> None:
    shm.chmod(0o777)
    path = shm / "pool"
    pool = PoolFile.create(settings(path, mode=0o666), (DEMO,))
    fill(pool, 0, 0, key_of(0))
    pool.close()
    scene = {"path": str(path), "bytes": 4 * MIB, "mode": 0o666, "pin": "mlock", "memlock": 65536, "nobody": True}
    before = path.read_bytes()
    status, out, _ = end_of(launch("owner_process", json.dumps(scene)))
    assert status == 0
    assert "locked memory" in json.loads(out)["error"]
    assert path.read_bytes() == before


@pytest.mark.parametrize("old_kernel", [False, True])
def test_backing_an_adopted_file_changes_no_byte(shm: Path, launch: Launcher, old_kernel: bool) -> None:
    path = shm / "pool"
    pool = PoolFile.create(settings(path, 80 * MIB), (DEMO,))
    slots = pool.geometry.regions[0].slots
    for slot in range(slots):
        fill(pool, 0, slot, key_of(slot))
    pool.close()
    scene = {"path": str(path), "bytes": 80 * MIB} | ({"refuse_advice": errno.EINVAL} if old_kernel else {})
    status, out, complaints = end_of(launch("owner_process", json.dumps(scene)))
    assert status == 0, complaints
    assert [(slot, key) for slot, key, _, _ in json.loads(out)["adopted"]] == [
        (slot, key_of(slot).hex()) for slot in range(slots)
    ]
    with PoolView(path) as view:
        for slot in range(slots):
            assert view.copy("demo", "kv", slot, key_of(slot)) == payload(key_of(slot), KV_BYTES)


def test_an_owner_killed_while_memory_is_backed_leaves_a_file_to_adopt(shm: Path, launch: Launcher) -> None:
    path = shm / "pool"
    scene = {"path": str(path), "bytes": 150 * MIB, "die": 1}
    for _ in range(2):
        owner = launch("owner_process", json.dumps(scene))
        assert owner.wait(timeout=30) == -signal.SIGKILL
    inode = path.stat().st_ino
    pool = PoolFile.create(settings(path, 150 * MIB), (DEMO,))
    assert path.stat().st_ino == inode
    assert path.stat().st_blocks * 512 >= pool.size
    assert (pool.generation, pool.adopted) == (2, [[]])
    fill(pool, 0, 0, key_of(0))
    pool.close()
    owner = launch("owner_process", json.dumps(scene))
    assert owner.wait(timeout=30) == -signal.SIGKILL
    pool = PoolFile.create(settings(path, 150 * MIB), (DEMO,))
    assert (pool.generation, [page.key for page in pool.adopted[0]]) == (3, [key_of(0)])
    pool.close()


def test_what_an_unfinished_file_still_needs_must_be_there(mounter: Mounter) -> None:
    mount = mounter("size=24m")
    path = mount / "pool"
    PoolFile.create(settings(path, 16 * MIB), (DEMO,)).close()
    with open(path, "r+b") as file:  # as if killed while it was backed
        os.truncate(file.fileno(), 8192)
        os.truncate(file.fileno(), 16 * MIB - 65536 + 12288)
    size = path.stat().st_size
    (mount / "crowd").write_bytes(bytes(12 * MIB))
    with pytest.raises(StartError, match=r"^pool\.bytes: need 1\d\.\d MiB on \S+, have 12\.0 MiB free"):
        PoolFile.create(settings(path, 16 * MIB), (DEMO,))
    assert path.stat().st_size == size


def test_a_full_mount_does_not_keep_a_pool_from_being_adopted(mounter: Mounter) -> None:
    mount = mounter("size=17m")
    pool = PoolFile.create(settings(mount / "pool", 16 * MIB), (DEMO,))
    fill(pool, 0, 0, key_of(0))
    pool.close()
    (mount / "crowd").write_bytes(bytes(MIB))
    with PoolView(mount / "pool"):
        pool = PoolFile.create(settings(mount / "pool", 16 * MIB), (DEMO,))
        assert len(pool.adopted[0]) == 1
        pool.close()


def test_a_file_on_a_disk_is_adopted_only_since_the_same_boot(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "pool"
    kernel = tmp_path / "proc/sys/kernel/random/boot_id"
    kernel.parent.mkdir(parents=True)
    roots = Roots(str(tmp_path / "proc"), str(tmp_path / "sys"))
    told = []
    for boot in ("0b5d0c35-4f1e-4c55-8f6b-000000000001", "0b5d0c35-4f1e-4c55-8f6b-000000000001", "", "", "no uuid"):
        kernel.write_text(f"{boot}\n")
        pool = PoolFile.create(settings(path), (DEMO,), roots=roots)
        told.append(len(pool.adopted[0]))
        fill(pool, 0, 0, key_of(0))
        pool.close()
    assert told == [0, 1, 0, 0, 0]
    assert "the machine may have been restarted since" in lines(caplog)[-1]


def test_memory_bound_to_another_node_is_not_adopted(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blueprint_module, "bind_to_node", lambda *arguments: None)
    path = shm / "pool"
    generations = []
    for node in (-1, 0, 0, 1, -1):
        pool = PoolFile.create(settings(path, numa_node=node), (DEMO,))
        generations.append((pool.generation, len(pool.adopted[0])))
        fill(pool, 0, 0, key_of(0))
        pool.close()
    # Who has no wish takes it from whichever node it is on.
    assert generations == [(1, 0), (2, 0), (3, 1), (4, 0), (5, 1)]


def test_huge_pages_that_are_asked_for_later_need_a_new_file(
    mounter: Mounter, caplog: pytest.LogCaptureFixture
) -> None:
    path = mounter("size=80m,huge=advise") / "pool"
    for word, adopted in (("off", 0), ("auto", 1), ("on", 0), ("on", 1)):
        pool = PoolFile.create(settings(path, 32 * MIB, hugepages=word), (DEMO,))
        assert (word, len(pool.adopted[0])) == (word, adopted)
        fill(pool, 0, 0, key_of(0))
        pool.close()
    assert any("in huge pages, have" in line for line in lines(caplog))


def test_the_mode_follows_the_settings(shm: Path, launch: Launcher, caplog: pytest.LogCaptureFixture) -> None:
    shm.chmod(0o777)
    path = shm / "pool"
    for mode in (0o600, 0o666):
        pool = PoolFile.create(settings(path, mode=mode), (DEMO,))
        assert path.stat().st_mode & 0o777 == mode
        pool.close()
    assert len(lines(caplog)) == 1
    # Somebody else's file that may be written, but not given another mode.
    inode = path.stat().st_ino
    scene = {"path": str(path), "bytes": 4 * MIB, "nobody": True}
    status, out, _ = end_of(launch("owner_process", json.dumps(scene)))
    assert status == 0
    if os.geteuid() == 0:
        assert json.loads(out)["generation"] == 3
        assert (path.stat().st_ino != inode, path.stat().st_uid) == (True, NOBODY)
