"""What the machine lets a pool take, asked before anything is changed, so that no SIGBUS or OOM kill comes later.

Each check raises StartError with one line: the setting, what is needed, and what there is.
"""

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forestage.core.errors import StartError
from forestage.pool.mount import Mount, MountKind

__all__ = ["HEADROOM_BYTES", "Roots", "check_memlock", "check_memory", "check_mount", "in_units", "shortage"]

# What the process takes besides the pool: 40 MiB of interpreter and libraries, 210 MiB of torch where it pins. Without
# this room the pool would fit, and the service be killed by the first requests.
HEADROOM_BYTES = 256 << 20

_CAP_IPC_LOCK = 14
# cgroup v1 says "no limit" with the largest page-aligned number.
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Roots:
    """Where the kernel's own file systems are."""

    proc: str = "/proc"
    sys: str = "/sys"


def in_units(size: int) -> str:
    """Write a size in bytes with the largest binary unit that leaves a number of at least 1."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << shift:
            return f"{size / (1 << shift):.1f} {unit}"
    return f"{size} bytes"


def shortage(setting: str, need: int, where: str, have: int, word: str, hint: str = "") -> StartError:
    """Build the one line that says what is needed, what there is, and which setting asks for it."""
    need_text, have_text = in_units(need), in_units(max(0, have))
    if need_text == have_text:
        need_text, have_text = f"{need} bytes", f"{max(0, have)} bytes"
    return StartError(f"{setting}: need {need_text} {where}, have {have_text} {word}{hint}")


def check_mount(mount: Mount, need: int, freed: int = 0, hint: str = "") -> None:
    """Check that the mount has room for `need` bytes when `freed` of them are given back first."""
    free = mount.free_bytes()
    if free is not None and free + freed < need:
        raise shortage("pool.bytes", need, f"on {mount.directory}", free + freed, "free", hint)


def check_memory(mount: Mount, need: int, freed: int, roots: Roots) -> None:
    """Check that machine and cgroups have the memory that the pool will be made of."""
    if mount.kind is MountKind.HUGE_PAGES:
        _check_huge_pages(mount, need, freed, roots)
    elif mount.kind is MountKind.MEMORY:
        _check_machine(need, freed, roots)
        _check_cgroups(need, freed, roots)


def _check_machine(need: int, freed: int, roots: Roots) -> None:
    for line in _lines(f"{roots.proc}/meminfo"):
        if line.startswith("MemAvailable:"):
            have = int(line.split()[1]) * 1024 + freed - HEADROOM_BYTES
            if have < need:
                raise shortage("pool.bytes", need, "of memory", have, f"available besides {in_units(HEADROOM_BYTES)}")


def _check_cgroups(need: int, freed: int, roots: Roots) -> None:
    for directory, version in _cgroup_directories(roots, "memory"):
        name = "memory.max" if version == 2 else "memory.limit_in_bytes"
        limit = _number(directory / name)
        if limit is None:
            continue
        # Page cache can be reclaimed and does not count; shared memory cannot, and the old pool may be part of it.
        prefix = "" if version == 2 else "total_"
        stat = dict(line.split() for line in _lines(str(directory / "memory.stat")))
        anon = int(stat.get("anon" if version == 2 else "total_rss", 0))
        shared = max(0, int(stat.get(f"{prefix}shmem", 0)) - freed)
        have = limit - anon - shared
        if have < need + HEADROOM_BYTES:
            where = f"(and {in_units(HEADROOM_BYTES)} for the process) under the limit of {in_units(limit)}"
            raise shortage("pool.bytes", need, f"{where} in {directory / name}", have, "left")


def _check_huge_pages(mount: Mount, need: int, freed: int, roots: Roots) -> None:
    page = mount.page_bytes
    counts = Path(roots.sys) / f"kernel/mm/hugepages/hugepages-{page // 1024}kB"
    read = {name: _number(counts / f"{name}_hugepages") or 0 for name in ("free", "resv", "nr_overcommit", "surplus")}
    pages = read["free"] - read["resv"] + max(0, read["nr_overcommit"] - read["surplus"])
    if pages * page + freed < need:
        where = f"in huge pages of {in_units(page)}"
        raise shortage("pool.bytes", need, where, pages * page + freed, f"free ({counts / 'nr_hugepages'})")
    size = f"{page >> 30}GB" if page >= 1 << 30 else f"{page >> 20}MB" if page >= 1 << 20 else f"{page >> 10}KB"
    for directory, version in _cgroup_directories(roots, "hugetlb"):
        limit_name, used_name = (
            (f"hugetlb.{size}.max", f"hugetlb.{size}.current")
            if version == 2
            else (f"hugetlb.{size}.limit_in_bytes", f"hugetlb.{size}.usage_in_bytes")
        )
        limit = _number(directory / limit_name)
        if limit is None:
            continue
        have = limit - max(0, (_number(directory / used_name) or 0) - freed)
        if have < need:
            raise shortage("pool.bytes", need, f"under {directory / limit_name}", have, "left")


def check_memlock(need: int, roots: Roots) -> None:
    """Check that `need` bytes may be locked in memory by this process."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard == resource.RLIM_INFINITY or hard >= need:
        return
    for line in _lines(f"{roots.proc}/self/status"):
        if line.startswith("CapEff:") and int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1:
            return
    hint = "; raise memlock or set pool.pin to none"
    raise shortage("pool.pin", need, "of locked memory for mlock", hard, "allowed (ulimit -H -l)", hint)


def _cgroup_directories(roots: Roots, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the directories of the cgroups this process is in, with the cgroup version, outermost last."""
    mounted = Path(roots.sys) / "fs/cgroup"
    for line in _lines(f"{roots.proc}/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            bases, version = [mounted, mounted / "unified"], 2
        elif controller in controllers.split(","):
            bases, version = [mounted / controller], 1
        else:
            continue
        # Inside a container the path may be that of the host (seen from outside, or with ".."), while only the own
        # cgroup is mounted: then its limit stands at the root of the mount.
        parts = [part for part in path.split("/") if part]
        if ".." in parts:
            parts = []
        for base in bases:
            for depth in range(len(parts), -1, -1):
                yield base.joinpath(*parts[:depth]), version


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []  # not this kind of machine, or hidden from us: nothing to check


def _number(path: Path) -> int | None:
    """Read one number; None when it is absent or stands for "no limit"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None
