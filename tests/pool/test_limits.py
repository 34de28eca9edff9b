"""What the machine allows, asked of kernel files laid out for the test."""

import re
import resource
from collections.abc import Mapping
from pathlib import Path

import pytest

from forestage.core.errors import StartError
from forestage.pool import limits
from forestage.pool.file import PoolFile, PoolSettings
from forestage.pool.limits import HEADROOM_BYTES, Roots, in_units
from forestage.pool.mount import Mount, MountKind
from pool.pages import DEMO

GIB = 1 << 30
MIB = 1 << 20
MEMORY = Mount("/dev/shm", MountKind.MEMORY, 4096)
HUGE = Mount("/mnt/huge", MountKind.HUGE_PAGES, 2 * MIB)
NO_LIMIT_V1 = 9223372036854771712


def lay(root: Path, files: Mapping[str, object]) -> Roots:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return Roots(str(root / "proc"), str(root / "sys"))


V2 = {
    "proc/self/cgroup": "0::/pod/container",
    "sys/fs/cgroup/pod/container/memory.max": "max",
    "sys/fs/cgroup/pod/memory.max": 2 * GIB,
    "sys/fs/cgroup/pod/memory.stat": f"anon {100 * MIB}\nfile {GIB}\nshmem {300 * MIB}",
}
V1 = {
    "proc/self/cgroup": "11:cpu,cpuacct:/x\n4:memory:/pod/container\n0::/",
    "sys/fs/cgroup/memory/pod/container/memory.limit_in_bytes": NO_LIMIT_V1,
    "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": 2 * GIB,
    "sys/fs/cgroup/memory/pod/memory.stat": f"total_rss {100 * MIB}\ncache {GIB}\ntotal_shmem {300 * MIB}\nrss 1",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
}
# A container that sees only its own cgroup, mounted as the root, under the path that the host knows.
INSIDE = {"proc/self/cgroup": "0::/kubepods/pod1/c2", "sys/fs/cgroup/memory.max": 1648 * MIB}
ABOVE = {"proc/self/cgroup": "0::/../../c2", "sys/fs/cgroup/memory.max": 1648 * MIB}


@pytest.mark.parametrize("files", [V2, V1, INSIDE, ABOVE])
def test_the_limit_of_any_cgroup_above_us_counts(tmp_path: Path, files: Mapping[str, object]) -> None:
    roots = lay(tmp_path, files)
    fits = 1648 * MIB - HEADROOM_BYTES
    limits.check_memory(MEMORY, fits, 0, roots)
    with pytest.raises(StartError) as raised:
        limits.check_memory(MEMORY, fits + 1, 0, roots)
    assert re.fullmatch(
        r"pool\.bytes: need 1\.4 GiB \(and 256\.0 MiB for the process\) under the limit of (2\.0|1\.6) GiB "
        rf"in {tmp_path}/sys/fs/cgroup/\S*, have 1\.6 GiB left",
        raised.value.detail,
    )


def test_shared_memory_that_the_old_pool_gives_back_counts_as_room(tmp_path: Path) -> None:
    roots = lay(tmp_path, V2)
    fits = 1648 * MIB - HEADROOM_BYTES
    limits.check_memory(MEMORY, fits + 200 * MIB, 200 * MIB, roots)
    with pytest.raises(StartError):
        # No more comes back than is charged here.
        limits.check_memory(MEMORY, fits + 301 * MIB, 900 * MIB, roots)


def test_a_start_above_the_cgroup_limit_is_refused_and_leaves_nothing(tmp_path: Path, shm: Path) -> None:
    roots = lay(tmp_path, INSIDE | {"sys/fs/cgroup/memory.max": 258 * MIB})
    with pytest.raises(StartError, match=r"^pool\.bytes: need 4\.0 MiB .* have 258\.0 MiB left$"):
        PoolFile.create(PoolSettings(str(shm / "new" / "pool"), 4 * MIB, pin="none"), (DEMO,), roots=roots)
    assert list(shm.iterdir()) == []
    lay(tmp_path, {"sys/fs/cgroup/memory.max": 260 * MIB})
    PoolFile.create(PoolSettings(str(shm / "pool"), 4 * MIB, pin="none"), (DEMO,), roots=roots).close()


def test_a_machine_without_the_memory_is_refused(tmp_path: Path) -> None:
    roots = lay(tmp_path, {"proc/meminfo": "MemTotal: 9999999 kB\nMemAvailable: 1048576 kB"})
    limits.check_memory(MEMORY, GIB - HEADROOM_BYTES, 0, roots)
    limits.check_memory(MEMORY, GIB, HEADROOM_BYTES, roots)
    with pytest.raises(StartError, match=r"need 1\.0 GiB of memory, have 768\.0 MiB available besides 256\.0 MiB"):
        limits.check_memory(MEMORY, GIB, 0, roots)


def test_a_disk_needs_no_memory(tmp_path: Path) -> None:
    roots = lay(tmp_path, V2 | {"proc/meminfo": "MemAvailable: 1 kB"})
    limits.check_memory(Mount("/", MountKind.DISK, 4096), 100 * GIB, 0, roots)


def test_huge_pages_must_be_free(tmp_path: Path) -> None:
    counts = "sys/kernel/mm/hugepages/hugepages-2048kB"
    files = {f"{counts}/free_hugepages": 12, f"{counts}/resv_hugepages": 2}
    files |= {f"{counts}/nr_overcommit_hugepages": 5, f"{counts}/surplus_hugepages": 1}
    roots = lay(tmp_path, files)
    limits.check_memory(HUGE, 28 * MIB, 0, roots)
    limits.check_memory(HUGE, 30 * MIB, 2 * MIB, roots)
    with pytest.raises(StartError, match=r"need 30\.0 MiB in huge pages of 2\.0 MiB, have 28\.0 MiB free"):
        limits.check_memory(HUGE, 30 * MIB, 0, roots)


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/c",
            "sys/fs/cgroup/c/hugetlb.2MB.max": 16 * MIB,
            "sys/fs/cgroup/c/hugetlb.2MB.current": 4 * MIB,
        },
        {
            "proc/self/cgroup": "3:hugetlb:/c",
            "sys/fs/cgroup/hugetlb/c/hugetlb.2MB.limit_in_bytes": 16 * MIB,
            "sys/fs/cgroup/hugetlb/c/hugetlb.2MB.usage_in_bytes": 4 * MIB,
        },
    ],
)
def test_the_cgroup_may_limit_huge_pages_too(tmp_path: Path, files: Mapping[str, object]) -> None:
    roots = lay(tmp_path, {**files, "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": 100})
    limits.check_memory(HUGE, 12 * MIB, 0, roots)
    limits.check_memory(HUGE, 16 * MIB, 4 * MIB, roots)
    with pytest.raises(StartError, match=r"need 14\.0 MiB under \S*/hugetlb\.2MB\.\S+, have 12\.0 MiB left"):
        limits.check_memory(HUGE, 14 * MIB, 0, roots)


def test_memlock_binds_those_without_the_capability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (65536, 8 * MIB))
    plain = lay(tmp_path / "plain", {"proc/self/status": "CapEff:\t0000000000000000"})
    able = lay(tmp_path / "able", {"proc/self/status": "CapEff:\t0000000000004000"})
    limits.check_memlock(8 * MIB, plain)
    limits.check_memlock(GIB, able)
    with pytest.raises(
        StartError, match=r"^pool\.pin: need 1\.0 GiB of locked memory for mlock, have 8\.0 MiB allowed"
    ):
        limits.check_memlock(GIB, plain)


def test_nothing_to_ask_means_nothing_to_refuse(tmp_path: Path) -> None:
    limits.check_memory(MEMORY, 1 << 60, 0, Roots(str(tmp_path), str(tmp_path)))


def test_equal_roundings_are_told_in_bytes() -> None:
    line = limits.shortage("pool.bytes", GIB + 1, "here", GIB, "free").detail
    assert line == f"pool.bytes: need {GIB + 1} bytes here, have {GIB} bytes free"
    assert in_units(1023) == "1023 bytes"
    assert in_units(5 << 40) == "5.0 TiB"
