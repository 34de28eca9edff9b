"""Measure what the simulation of `scaling.py` is fed with, and hold it against 1, 2 and 4 services on one Redis.

    python benchmarks/scaling_check.py [--services 1 2 4] [--seconds 3] [--page 1024] [--json FILE]

First the seconds of CPU that a service and Redis spend: by GiB, by read, by key of a probe, by request. Then so many
services, each asked for 64 MiB that only Redis has as soon as the last 64 MiB are in its pool, beside what the
simulation says of them when it is given those seconds, and the cores that all of them share, and nothing else. At last
16 MiB at a time over one slow link, which is what they wait for then, however busy the machine is with other things.
"""

import argparse
import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from _fleet import GIB, Costs, Fleet, Load, percentile
from _fleet_run import simulate
from _support import (
    PREFIX,
    add_options,
    fill,
    make_keys,
    make_model,
    print_progress,
    print_table,
    redis_at,
    run_async,
    write_json,
)
from forestage.core.layout import ModelLayout
from forestage.storage.base import Probe
from forestage.storage.redis import RedisStorage
from forestage_client import Client
from support.redis_servers import RedisServer
from support.running import Running, running
from support.slow_link import slow_link

__all__: list[str] = []

_JOB_BYTES = 64 << 20
_LINK_JOB_BYTES = 16 << 20
_PROBE_KEYS = 4096
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_CONFIG = """
[server]
port = 0
[pool]
path = "{folder}/pool"
bytes = "{pool}"
pin = "none"
[storage]
kind = "redis"
[storage.redis]
url = "{url}"
prefix = "{prefix}"
[prefetch]
max_inflight_fraction = 1.0
[[models]]
name = "bench"
page_tokens = 64
[[models.components]]
name = "kv"
bytes = {page}
slots = {slots}
"""


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has spent."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND


def _busy_s() -> float:
    """Return the seconds that all cores together have worked, for whomever."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS_A_SECOND  # but idle and waiting for disks


@contextmanager
def _services(url: str, count: int, page: int, job_bytes: int = _JOB_BYTES) -> Iterator[list[Running]]:
    with ExitStack() as stack:
        services = []
        for _ in range(count):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="forestage-bench-", dir="/dev/shm"))
            slots = job_bytes // page
            pool = job_bytes + (16 << 20)
            config = Path(folder, "forestage.toml")
            config.write_text(_CONFIG.format(folder=folder, pool=pool, url=url, prefix=PREFIX, page=page, slots=slots))
            services.append(stack.enter_context(running(config, "--log-level", "error")))
        yield services


class _Loop(threading.Thread):
    """Asks one service for one prefix after another, each read from Redis as a whole, until told to stop."""

    def __init__(self, service: Running, chains: Sequence[Sequence[bytes]], *, resident: bool = False) -> None:
        super().__init__()
        self._service, self._chains, self._resident = service, itertools.cycle(chains), resident
        self.counting = threading.Event()
        self.over = threading.Event()
        self.job_s: list[float] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with Client(self._service.url, timeout_s=60) as client:
                while not self.over.is_set():
                    keys = next(self._chains)
                    begin, counted = time.perf_counter(), self.counting.is_set()
                    job = client.prefetch("bench", keys, wait_ms=60_000)
                    if counted and (job.pages.ready, job.loaded) != (len(keys), 0 if self._resident else len(keys)):
                        raise RuntimeError(f"not what was to be measured: {job}")
                    if counted:
                        self.job_s.append(time.perf_counter() - begin)
                    client.cancel(job.request_id)
        except Exception as error:
            self.error = error


def _drive(
    server: RedisServer, services: Sequence[Running], chains: Sequence[Sequence[bytes]], seconds: float, **how: bool
) -> dict[str, Any]:
    """Ask all services at once for so long; return what came of it, and the CPU seconds that it took."""
    loops = [_Loop(service, chains, **how) for service in services]
    for loop in loops:
        loop.start()
    time.sleep(1.0)  # pools fill, connections open
    pids = [server.pid, *(service.process.pid for service in services)]
    before = [_cpu_s(pid) for pid in pids]
    all_before, own_before = _busy_s(), time.process_time()
    begin = time.perf_counter()
    for loop in loops:
        loop.counting.set()
    time.sleep(seconds)
    for loop in loops:
        loop.over.set()
    for loop in loops:
        loop.join()
    took, all_after = time.perf_counter() - begin, _busy_s()
    for loop in loops:
        if loop.error:
            raise loop.error
    spent = [_cpu_s(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
    job_s = [spent_s for loop in loops for spent_s in loop.job_s]
    own = time.process_time() - own_before
    others = max(0.0, all_after - all_before - sum(spent) - own) / took
    return {
        "seconds": took,
        "job_s": job_s,
        "redis_s": spent[0],
        "service_s": sum(spent[1:]),
        "driver_s": own,
        "other cores": others,
    }


def _probe_costs(server: RedisServer, model: ModelLayout) -> tuple[float, float]:
    """Return the CPU seconds that a key of a probe takes us, and Redis."""
    keys, times = make_keys(_PROBE_KEYS), 150

    async def ask() -> None:
        storage = RedisStorage(server.url, prefix=PREFIX)
        await storage.open()
        probe = Probe(keys, first_page=0, first_tail=0, known=bytes(len(keys)))
        for _ in range(times):
            await storage.probe(model, probe)
        await storage.aclose()

    run_async(fill(server, model, keys))
    pid = server.pid
    ours, theirs = time.process_time(), _cpu_s(pid)
    run_async(ask())
    asked = times * _PROBE_KEYS
    return (time.process_time() - ours) / asked, (_cpu_s(pid) - theirs) / asked


def _costs(page: int, seconds: float) -> Costs:
    """Measure what a service and Redis spend."""
    small = 64 << 10
    seen: dict[int, dict[str, Any]] = {}
    with redis_at(unix=False) as server:
        pod_key, node_key = _probe_costs(server, make_model(64))
        for size in (small, page):
            model, count = make_model(size), _JOB_BYTES // size
            chains = [make_keys(count, chain) for chain in (0, 1)]
            for keys in chains:
                run_async(fill(server, model, keys))
            with _services(server.url, 1, size) as services:
                seen[size] = _drive(server, services, chains, seconds)
                resident = _drive(server, services, chains[:1], 1.0, resident=True)
    # Who asks and who answers: both are at work for a request, on the same cores.
    job_s = (resident["service_s"] + resident["driver_s"]) / len(resident["job_s"])
    by_size = {}
    for size, of in seen.items():
        pages = len(of["job_s"]) * _JOB_BYTES / size
        ours = of["service_s"] + of["driver_s"] - job_s * len(of["job_s"])
        by_size[size] = of["redis_s"] / pages, ours / pages
    # Two sizes, two unknowns: seconds by read and by byte.
    by_byte = max(0.0, (by_size[page][0] - by_size[small][0]) / (page - small))
    by_read = max(0.0, by_size[page][0] - page * by_byte)
    return Costs(
        pod_s_per_gib=by_size[page][1] * GIB / page,
        pod_s_per_key=pod_key,
        pod_s_per_job=job_s,
        node_s_per_gib=by_byte * GIB,
        node_s_per_read=by_read,
        node_s_per_key=node_key,
    )


def _compare(costs: Costs, page: int, counts: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    model, count = make_model(page), _JOB_BYTES // page
    chains = [make_keys(count, chain) for chain in (0, 1)]
    cores = len(os.sched_getaffinity(0))
    rows = []
    with redis_at(unix=False) as server:
        for keys in chains:
            run_async(fill(server, model, keys))
        for services in counts:
            with _services(server.url, services, page) as started:
                seen = _drive(server, started, chains, seconds)
            # Loopback has no speed of its own: its cost is in the CPU seconds.
            # What others took of the cores makes ours slower.
            slower = costs.times(cores / max(0.1, cores - seen["other cores"]))
            fleet = Fleet(services, 1, slower, page, 1e15, 1e15, 0.0, 4, cores, host_cores=cores)
            told = simulate(fleet, Load(0.0, 0, count, heads=0), seconds, warm_up=1.0)
            measured = len(seen["job_s"]) * _JOB_BYTES / seen["seconds"] / 1e9
            rows.append(
                {
                    "services": services,
                    "GB/s": measured,
                    "simulated": told.bytes_per_s / 1e9,
                    "ratio": told.bytes_per_s / 1e9 / measured,
                    "job ms p50": 1e3 * percentile(seen["job_s"], 0.5),
                    "simulated p50": 1e3 * percentile(told.job_s, 0.5),
                    "cores of others": seen["other cores"],
                    "service s/GiB": seen["service_s"] * GIB / (len(seen["job_s"]) * _JOB_BYTES),
                    "redis s/GiB": seen["redis_s"] * GIB / (len(seen["job_s"]) * _JOB_BYTES),
                    "simulated limit": told.first_limit,
                }
            )
            print_progress(rows[-1])
    return rows


def _compare_on_link(
    costs: Costs, page: int, counts: Sequence[int], seconds: float, link: float
) -> list[dict[str, Any]]:
    """The same, but what all of them share is a link that is slow enough for cores not to matter."""
    model, count = make_model(page), _LINK_JOB_BYTES // page
    chains = [make_keys(count, chain) for chain in (0, 1)]
    cores = len(os.sched_getaffinity(0))
    rows = []
    with redis_at(unix=False) as server, slow_link(server.port, link) as port:
        for keys in chains:
            run_async(fill(server, model, keys))
        for services in counts:
            with _services(f"redis://127.0.0.1:{port}/0", services, page, _LINK_JOB_BYTES) as started:
                seen = _drive(server, started, chains, seconds)
            fleet = Fleet(services, 1, costs, page, link, 1e15, 0.0, 4, cores, host_cores=cores)
            told = simulate(fleet, Load(0.0, 0, count, heads=0), seconds, warm_up=1.0)
            p50, told_p50 = percentile(seen["job_s"], 0.5), percentile(told.job_s, 0.5)
            rows.append(
                {
                    "services": services,
                    "job ms p50": 1e3 * p50,
                    "simulated p50": 1e3 * told_p50,
                    "ratio": told_p50 / p50,
                    "p99": 1e3 * percentile(seen["job_s"], 0.99),
                    "simulated p99": 1e3 * percentile(told.job_s, 0.99),
                    "jobs": len(seen["job_s"]),
                    "simulated limit": told.first_limit,
                }
            )
            print_progress(rows[-1])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--page", type=int, default=1024, help="page size in KiB")
    parser.add_argument("--link", type=int, default=128, help="MiB/s of the link")
    add_options(parser, repeat=1)
    options = parser.parse_args()
    costs = _costs(options.page << 10, options.seconds)
    cost_row = {
        "service s/GiB": costs.pod_s_per_gib,
        "us/key": 1e6 * costs.pod_s_per_key,
        "us/request": 1e6 * costs.pod_s_per_job,
        "redis s/GiB": costs.node_s_per_gib,
        "us/read": 1e6 * costs.node_s_per_read,
        "redis us/key": 1e6 * costs.node_s_per_key,
    }
    print_table("CPU seconds", [cost_row])
    rows = [
        row
        for _ in range(options.repeat)
        for row in _compare(costs, options.page << 10, options.services, options.seconds)
    ]
    print_table(f"{_JOB_BYTES >> 20} MiB at a time, {len(os.sched_getaffinity(0))} cores", rows)
    linked = _compare_on_link(
        costs, options.page << 10, options.services, options.seconds * 2, options.link * (1 << 20)
    )
    print_table(f"{_LINK_JOB_BYTES >> 20} MiB at a time, over one link of {options.link} MiB/s", linked)
    write_json(
        options.json, "scaling_check", [cost_row, *rows, *linked], page_kib=options.page, seconds=options.seconds
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
