"""Starts: what a pool file is after one, and what is refused, with nothing left behind."""

import errno
import fcntl
import json
import os
import re
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forestage.core.errors import StartError
from forestage.core.layout import Component, ModelLayout
from forestage.pool import blueprint as blueprint_module
from forestage.pool import claim
from forestage.pool import file as file_module
from forestage.pool.file import PoolFile, PoolSettings
from forestage_client.pool_view import PoolFormatError, PoolView
from pool.conftest import Launcher, Mounter, end_of
from pool.owner_process import NOBODY
from pool.pages import DEMO, HYBRID, KV_BYTES, fill, key_of

MIB = 1 << 20


def settings(path: Path, size: int = 4 * MIB, **others: Any) -> PoolSettings:
    return PoolSettings(str(path), size, **{"pin": "none"} | others)


def refusal(settings: PoolSettings, *models: ModelLayout) -> str:
    """Return the line of a refused start, having seen that it left everything as it was."""
    parent = Path(settings.path).parent
    before = sorted(parent.iterdir()) if parent.is_dir() else None
    with pytest.raises(StartError) as raised:
        PoolFile.create(settings, models or (DEMO,))
    assert (sorted(parent.iterdir()) if parent.is_dir() else None) == before
    assert "\n" not in raised.value.detail
    return raised.value.detail


def run(launch: Launcher, scene: dict[str, Any]) -> dict[str, Any]:
    status, out, complaints = end_of(launch("owner_process", json.dumps(scene)))
    assert (status, complaints) == (0, "")
    answer: dict[str, Any] = json.loads(out)
    return answer


@pytest.fixture
def loose_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_a_start_reserves_the_file_and_describes_it(shm: Path, loose_umask: None) -> None:
    path = shm / "deep" / "er" / "pool"
    steps: list[tuple[int, int]] = []
    pool = PoolFile.create(settings(path, 4 * MIB + 100), (DEMO, HYBRID), lambda *step: steps.append(step))
    status = path.stat()
    assert status.st_size == pool.size <= 4 * MIB + 100
    assert status.st_blocks * 512 >= pool.size
    assert stat.S_IMODE(status.st_mode) == 0o660
    assert steps == [(pool.size, pool.size)]
    assert (pool.generation, pool.pinned, pool.path) == (1, "none", str(path))
    assert re.fullmatch("[0-9a-f]{32}", pool.instance)
    assert [table.region for table in pool.tables] == list(pool.geometry.regions)
    with PoolView(path) as view:
        assert (view.instance, view.generation, view.size) == (pool.instance, 1, pool.size)
        assert set(view.regions) == {"demo", "acme/hybrid"}
        for region in pool.geometry.regions:
            seen = view.regions[region.model.name][region.component.name]
            assert (seen.offset, seen.slots, seen.slot_bytes) == (
                region.offset,
                region.slots,
                region.component.slot_bytes,
            )
    pool.close()
    pool.close()
    assert path.stat().st_ino == status.st_ino


def test_progress_is_told_step_by_step_and_comes_to_the_end(shm: Path) -> None:
    steps: list[tuple[int, int]] = []
    pool = PoolFile.create(settings(shm / "pool", 150 * MIB), (DEMO,), lambda *step: steps.append(step))
    assert len(steps) == 3
    assert {total for _, total in steps} == {pool.size}
    done = [done for done, _ in steps]
    assert done == sorted(done)
    assert done[-1] == pool.size
    pool.close()


def test_views_lie_where_the_region_says(shm: Path) -> None:
    pool = PoolFile.create(settings(shm / "pool"), (HYBRID,))
    for index, region in enumerate(pool.geometry.regions):
        component = region.component
        for slot in (0, region.slots - 1):
            views = pool.shard_views(index, slot)
            assert [len(view) for view in views] == [component.bytes] * component.shards
            whole = pool.slot_view(index, slot)
            assert len(whole) == component.slot_bytes
            for shard, view in enumerate(views):
                view[:] = bytes([shard + 1]) * len(view)
                start = shard * component.shard_bytes
                assert whole[start : start + component.bytes] == view
            with open(shm / "pool", "rb") as file:
                file.seek(region.offset + slot * component.slot_bytes)
                assert file.read(component.slot_bytes) == whole
            whole.release()
            for view in views:
                view.release()
    pool.close()


def test_a_second_owner_is_refused_while_the_first_lives(shm: Path, launch: Launcher) -> None:
    path = shm / "pool"
    owner = launch("owner_process", json.dumps({"path": str(path), "bytes": 4 * MIB, "hold": True}))
    assert owner.stdout is not None
    owner.stdout.readline()
    inode = path.stat().st_ino
    assert refusal(settings(path)) == f"pool.path: {path} is in use by another running service"
    assert path.stat().st_ino == inode
    owner.kill()
    owner.wait()
    pool = PoolFile.create(settings(path), (DEMO,))
    assert pool.generation == 2
    assert pool.is_linked()
    # Closed, but a thread may still write through this view: not free for another owner yet.
    view = pool.slot_view(0, 0)
    pool.close()
    assert "in use" in refusal(settings(path))
    view[:1] = b"x"
    view.release()
    PoolFile.create(settings(path), (DEMO,)).close()


def test_a_file_that_was_replaced_before_it_could_be_locked_is_looked_up_anew(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shm / "pool"
    for _ in range(2):
        PoolFile.create(settings(path), (DEMO,)).close()
    path.rename(shm / "second")
    PoolFile.create(settings(path), (DEMO,)).close()
    lock = claim._lock

    def late(fd: int, path_: str) -> None:
        monkeypatch.setattr(claim, "_lock", lock)
        (shm / "second").rename(path)
        lock(fd, path_)

    monkeypatch.setattr(claim, "_lock", late)
    pool = PoolFile.create(settings(path), (DEMO,))
    assert pool.generation == 3
    pool.close()


def test_of_many_that_start_at_once_one_owns_the_pool(shm: Path, launch: Launcher) -> None:
    scene = {"path": str(shm / "pool"), "bytes": MIB // 2, "contend": 25}
    owners = [launch("owner_process", json.dumps(scene)) for _ in range(4)]
    won = 0
    for owner in owners:
        status, out, complaints = end_of(owner)
        assert (status, complaints) == (0, "")
        answer = json.loads(out)
        assert {re.sub(r" /\S+", "", line) for line in answer["refused"]} <= {
            "pool.path: is in use by another running service",
            "pool.path: another service has just taken",
        }
        won += answer["won"]
    assert won > 0
    pool = PoolFile.create(settings(shm / "pool"), (DEMO,))
    # Each winner counted on from the one before it, so none ran beside another unseen.
    assert won < pool.generation
    pool.close()
    assert [file.name for file in shm.iterdir()] == ["pool"]


def test_a_pool_whose_owner_was_killed_while_it_was_made_is_not_read(shm: Path, launch: Launcher) -> None:
    path = shm / "pool"
    owner = launch("owner_process", json.dumps({"path": str(path), "bytes": 4 * MIB, "die": 1}))
    assert owner.wait(timeout=30) == -signal.SIGKILL
    with pytest.raises(PoolFormatError, match="preparing"):
        PoolView(path)
    PoolFile.create(settings(path), (DEMO,)).close()
    PoolView(path).close()


def test_a_stop_during_the_start_leaves_nothing(shm: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise InterruptedError("SIGTERM")

    with pytest.raises(InterruptedError):
        PoolFile.create(settings(shm / "new" / "pool"), (DEMO,), stop)
    assert list(shm.iterdir()) == []
    PoolFile.create(settings(shm / "new" / "pool"), (DEMO,)).close()


def test_a_start_that_fails_removes_only_its_own_file(shm: Path) -> None:
    path = shm / "pool"

    def swap_and_stop(done: int, total: int) -> None:
        path.rename(shm / "moved")
        path.write_text("somebody else's")
        raise InterruptedError

    with pytest.raises(InterruptedError):
        PoolFile.create(settings(path), (DEMO,), swap_and_stop)
    assert path.read_text() == "somebody else's"


@pytest.mark.parametrize("size", [-5, 0, 1, 4096, KV_BYTES])
def test_impossible_sizes_are_refused(shm: Path, size: int) -> None:
    line = refusal(settings(shm / "new" / "pool", size))
    assert re.fullmatch(rf"pool\.bytes: need at least \d+ bytes for one slot of every component, have {size}", line)
    assert list(shm.iterdir()) == []


def test_more_than_the_file_system_has_is_refused(shm: Path) -> None:
    room = os.statvfs(shm)
    line = refusal(settings(shm / "new" / "pool", 2 * room.f_blocks * room.f_frsize))
    assert re.fullmatch(r"pool\.bytes: need [\d.]+ .iB on /dev/shm/[^ ]+, have [\d.]+ .iB free", line)
    assert list(shm.iterdir()) == []


def test_a_name_that_does_not_fit_the_format_is_refused(shm: Path) -> None:
    line = refusal(settings(shm / "new" / "pool"), ModelLayout("m" * 129, 1, (Component("kv", 64),)))
    assert line.startswith("models: the model name 'mmm")
    assert list(shm.iterdir()) == []


def test_unknown_words_are_refused(shm: Path) -> None:
    assert refusal(settings(shm / "pool", pin="gpu")) == "pool.pin: 'gpu' is none of auto, cuda, mlock, none"
    assert refusal(settings(shm / "pool", hugepages="yes")) == "pool.hugepages: 'yes' is none of auto, on, off"


def test_a_numa_node_that_is_not_there_is_refused(shm: Path) -> None:
    assert "need NUMA node 900" in refusal(settings(shm / "new" / "pool", numa_node=900))
    assert list(shm.iterdir()) == []


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").exists(), reason="a kernel without NUMA")
def test_memory_comes_from_the_node_that_was_asked_for(shm: Path) -> None:
    pool = PoolFile.create(settings(shm / "pool", numa_node=0), (DEMO,))
    with open("/proc/self/numa_maps") as maps:
        (line,) = [line for line in maps if str(shm) in line]
    assert "bind:0" in line
    assert int(re.findall(r" N0=(\d+)", line)[0]) * 4096 >= pool.size
    pool.close()


def test_foreign_files_are_refused_and_stay(shm: Path) -> None:
    path = shm / "pool"
    for content in (b"x", b"#!/bin/sh\n" * 1000, bytes(8192)):
        path.write_bytes(content)
        assert refusal(settings(path)) == (
            f"pool.path: {path} is not a Forestage pool; move it away or choose another path"
        )
        assert path.read_bytes() == content


def test_links_directories_and_pipes_are_refused_and_stay(shm: Path) -> None:
    target = shm / "target"
    PoolFile.create(settings(target), (DEMO,)).close()
    before = target.stat()
    (shm / "link").symlink_to(target)
    (shm / "dangling").symlink_to(shm / "nowhere")
    for link in ("link", "dangling"):
        assert "is a symbolic link" in refusal(settings(shm / link))
    after = target.stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (before.st_ino, before.st_mtime_ns, before.st_size)
    (shm / "directory").mkdir()
    os.mkfifo(shm / "pipe")
    for other in ("directory", "pipe"):
        assert "is not a regular file" in refusal(settings(shm / other))
    assert "not a directory" in refusal(settings(target / "pool")).lower()


def test_a_directory_that_we_may_not_write_is_refused_naming_user_and_mode(shm: Path, launch: Launcher) -> None:
    (shm / "theirs").mkdir()
    (shm / "theirs").chmod(0o555)
    uid = os.geteuid() or NOBODY
    for tail in ("pool", "new/pool"):
        answer = run(launch, {"path": str(shm / "theirs" / tail), "bytes": 4 * MIB, "nobody": True})
        assert f"as uid {uid}: Permission denied" in answer["error"]
        assert f"{shm}/theirs belongs to uid {os.geteuid()} with mode 0555" in answer["error"]
    assert list((shm / "theirs").iterdir()) == []


def test_another_users_pool_is_refused_naming_user_and_mode(shm: Path, launch: Launcher) -> None:
    path = shm / "pool"
    PoolFile.create(settings(path, mode=0o400), (DEMO,)).close()
    answer = run(launch, {"path": str(path), "bytes": 4 * MIB, "nobody": True})
    assert f"{path} belongs to uid {os.geteuid()} with mode 0400" in answer["error"]


@pytest.mark.parametrize("word", ["mlock", "auto"])
def test_a_small_memlock_is_told_honestly(shm: Path, launch: Launcher, word: str) -> None:
    shm.chmod(0o777)
    scene = {"path": str(shm / "pool"), "bytes": 4 * MIB, "pin": word, "memlock": 65536, "nobody": True}
    answer = run(launch, scene)
    if word == "auto":
        assert answer["pinned"] == "none"
    else:
        assert answer["error"].startswith("pool.pin: need 4.0 MiB of locked memory for mlock, have 64.0 KiB allowed")
        assert list(shm.iterdir()) == []


def test_an_unknown_populate_advice_does_not_stop_the_start(shm: Path, launch: Launcher) -> None:
    answer = run(launch, {"path": str(shm / "pool"), "bytes": 80 * MIB, "refuse_advice": errno.EINVAL})
    assert answer["backed"] >= answer["size"] > 79 * MIB
    PoolView(shm / "pool").close()


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EFAULT])
def test_memory_that_runs_out_while_filling_is_an_error_not_a_signal(shm: Path, launch: Launcher, number: int) -> None:
    answer = run(launch, {"path": str(shm / "new" / "pool"), "bytes": 4 * MIB, "refuse_advice": number})
    assert re.match(r"pool\.bytes: need 4\.0 MiB on /dev/shm.*, have .* left", answer["error"])
    assert os.strerror(number) in answer["error"]
    assert list(shm.iterdir()) == []


def test_a_mount_too_small_is_refused_and_the_old_pool_counts_as_room(mounter: Mounter) -> None:
    mount = mounter("size=24m")
    line = refusal(settings(mount / "pool", 32 * MIB))
    assert line == f"pool.bytes: need 31.9 MiB on {mount}, have 24.0 MiB free"
    PoolFile.create(settings(mount / "pool", 16 * MIB), (DEMO,)).close()
    # 16 of 24 MiB are the old pool's: one of another size fits only once that is gone.
    with PoolView(mount / "pool") as reader:
        line = refusal(settings(mount / "pool", 20 * MIB))
        assert line.endswith(f"have 8.0 MiB free (the old pool file there is still mapped by process {os.getpid()})")
        assert reader.instance == PoolView(mount / "pool").instance
    pool = PoolFile.create(settings(mount / "pool", 20 * MIB), (DEMO,))
    assert pool.generation == 2
    pool.close()


def test_five_kills_on_a_mount_of_one_and_a_half_pools(mounter: Mounter, launch: Launcher) -> None:
    mount = mounter("size=24m,mode=777")
    for generation in range(1, 6):
        # Every other start wants another layout.
        scene = {"path": str(mount / "pool"), "bytes": (16 + generation // 2) * MIB, "hold": True}
        owner = launch("owner_process", json.dumps(scene))
        assert owner.stdout is not None
        assert json.loads(owner.stdout.readline())["generation"] == generation
        owner.kill()
        owner.wait()
        assert [file.name for file in mount.iterdir()] == ["pool"]


@pytest.mark.parametrize("old_kernel", [False, True])
def test_a_mount_that_fills_up_meanwhile_is_an_error_not_a_signal(
    mounter: Mounter, launch: Launcher, old_kernel: bool
) -> None:
    mount = mounter("size=160m")
    scene = {"path": str(mount / "pool"), "bytes": 150 * MIB, "crowd": str(mount / "crowd")}
    answer = run(launch, scene | ({"refuse_advice": errno.EINVAL} if old_kernel else {}))
    assert answer["error"].startswith(f"pool.bytes: need 150.0 MiB on {mount}, have ")
    assert [file.name for file in mount.iterdir()] == ["crowd"]


def test_huge_pages_of_tmpfs_are_used_where_the_mount_allows_it(mounter: Mounter) -> None:
    willing, unwilling = mounter("size=64m,huge=advise"), mounter("size=64m,huge=never")
    pool = PoolFile.create(settings(willing / "pool", 32 * MIB, hugepages="on"), (DEMO,))
    assert pool.hugepages == "transparent"
    assert pool.huge_bytes >= 28 * MIB
    pool.close()
    for mount, word in ((willing, "off"), (unwilling, "auto")):
        pool = PoolFile.create(settings(mount / "pool", 32 * MIB, hugepages=word), (DEMO,))
        assert (pool.hugepages, pool.huge_bytes) == ("none", 0)
        pool.close()
        os.unlink(mount / "pool")
    line = refusal(settings(unwilling / "pool", 32 * MIB, hugepages="on"))
    assert line.startswith("pool.hugepages: need 31.9 MiB in huge pages, have 0 bytes")


@pytest.fixture
def huge_pages() -> Iterator[int]:
    """Eight more free huge pages of 2 MiB; needs root."""
    if os.geteuid() != 0:
        pytest.skip("reserving huge pages needs root")
    count = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
    before = int(count.read_text())
    count.write_text(str(before + 8))
    yield int((count.parent / "free_hugepages").read_text())
    count.write_text(str(before))


def test_hugetlbfs_holds_a_pool_of_whole_huge_pages(mounter: Mounter, huge_pages: int) -> None:
    mount = mounter("pagesize=2M", "hugetlbfs")
    path = mount / "pool"
    for generation in (1, 2):
        pool = PoolFile.create(settings(path, 11 * MIB), (DEMO,))
        assert (pool.size, pool.hugepages, pool.generation) == (10 * MIB, "hugetlbfs", generation)
        assert len(pool.adopted[0]) == generation - 1
        content = fill(pool, 0, 1, key_of(1))
        with PoolView(path) as view:
            assert view.copy("demo", "kv", 1, key_of(1)) == content
        assert path.stat().st_blocks * 512 >= pool.size
        pool.close()
    path.unlink()
    line = refusal(settings(path, (huge_pages + 1) * 2 * MIB))
    assert "in huge pages of 2.0 MiB, have " in line
    assert "in whole pages of 2.0 MiB" in refusal(settings(path, 2 * MIB - 1))


def test_starts_that_were_killed_on_hugetlbfs_are_gone_on_with(
    mounter: Mounter, huge_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the first byte could be written, and while memory was backed; no page is left for a second pool."""
    path = mounter("pagesize=2M", "hugetlbfs") / "pool"
    size = huge_pages * 2 * MIB
    path.touch(0o660)
    os.truncate(path, size)
    owner = PoolFile.create(settings(path, size), (DEMO,))
    assert (owner.size, owner.generation) == (size, 1)
    owner.close()
    path.unlink()

    def killed(*arguments: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(blueprint_module, "populate", killed)
        patched.setattr(file_module, "remove_if_same", lambda *arguments: None)
        with pytest.raises(SystemExit):
            PoolFile.create(settings(path, size), (DEMO,))
    assert 0 < path.stat().st_blocks * 512 < size
    pool = PoolFile.create(settings(path, size), (DEMO,))
    assert pool.generation == 2
    assert path.stat().st_blocks * 512 >= pool.size
    pool.close()


def test_a_file_on_a_disk_is_reserved_too(tmp_path: Path) -> None:
    pool = PoolFile.create(settings(tmp_path / "pool"), (DEMO,))
    assert (tmp_path / "pool").stat().st_blocks * 512 >= pool.size
    pool.close()


def test_the_lock_is_that_of_the_file_and_ends_with_the_pool(shm: Path) -> None:
    pool = PoolFile.create(settings(shm / "pool"), (DEMO,))
    with open(shm / "pool", "rb") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        pool.close()
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Anybody's lock counts; nobody is robbed of his file.
        assert "in use" in refusal(settings(shm / "pool"))


def test_it_is_noticed_when_somebody_removed_the_file(shm: Path) -> None:
    pool = PoolFile.create(settings(shm / "pool"), (DEMO,))
    assert pool.is_linked()
    os.rename(shm / "pool", shm / "elsewhere")
    assert not pool.is_linked()
    (shm / "pool").write_bytes(b"")
    assert not pool.is_linked()
    pool.close()
