"""A fleet of services on one shared L3, simulated page by page.

Law: every page asked for is delivered once: asked == delivered + on its way. A pod has at most `pages_in_flight` pages
in flight, and at most `replies_due` of them from one node. The same seed gives the same figures.
"""

import random
import statistics
import zlib
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

from _fleet import GIB, Fleet, Load, Result
from _station import Clock, Station

__all__ = ["simulate"]


def simulate(fleet: Fleet, load: Load, seconds: float, *, warm_up: float = 0.0, seed: int = 0) -> Result:
    """Run a fleet for so many seconds of its time, the warm-up before them not counted. Deterministic by the seed."""
    run = _Run(fleet, load, random.Random(seed))
    run.clock.run(warm_up)
    run.mark()
    run.clock.run(warm_up + seconds)
    run.check_integrity()
    return run.result(seconds)


@dataclass(slots=True, eq=False)
class _Job:
    begin: float
    keys: int
    pages: list[int]  # the node of each page that is not resident
    left: int = 0


@dataclass(slots=True, eq=False)
class _Pod:
    number: int
    link: Station
    readers: Station
    loop: Station
    due: list[int]  # by node: pages on their way
    held_up: list[deque[_Job]]  # by node: pages that wait for room in its window
    queue: deque[tuple[_Job, int]] = field(default_factory=deque)
    in_flight: int = 0
    pool: "OrderedDict[int, int]" = field(default_factory=OrderedDict)
    pooled: int = 0
    tails: int = 0


class _Run:
    def __init__(self, fleet: Fleet, load: Load, rng: random.Random) -> None:
        self.fleet, self.load, self.clock, self._rng = fleet, load, Clock(), rng
        station = partial(Station, self.clock)
        host = station(fleet.host_cores) if fleet.host_cores else None
        self.nodes = [station(inside=host) for _ in range(fleet.nodes)]
        self.node_links = [station() for _ in range(fleet.nodes)]
        self.meta = [station() for _ in range(fleet.meta)]
        threads = fleet.readers if host else min(fleet.readers, fleet.pod_cores)
        nodes = range(fleet.nodes)
        self.pods = [
            _Pod(
                number, station(), station(threads, host), station(1, host), [0] * fleet.nodes, [deque() for _ in nodes]
            )
            for number in range(fleet.pods)
        ]
        self.kinds: dict[str, list[Station]] = {
            "node thread": self.nodes,
            "node link": self.node_links,
            "pod link": [pod.link for pod in self.pods],
            "pod readers": [pod.readers for pod in self.pods],
            "pod loop": [pod.loop for pod in self.pods],
            **({"metadata": self.meta} if fleet.meta else {}),
            **({"host": [host]} if host else {}),
        }
        self._weights = list(accumulate((rank + 1) ** -load.skew for rank in range(load.heads)))
        self.asked = self.delivered = self.wanted = self.resident = 0
        self.job_s: list[float] = []
        self.probe_s: list[float] = []
        self.mark()
        for pod in self.pods:
            for head in range(load.pinned):
                pod.pool[head] = load.head_pages
            self._next_arrival(pod)

    def mark(self) -> None:
        """Begin to count anew."""
        self.job_s, self.probe_s = [], []
        self._before = {kind: [s.busy_s for s in stations] for kind, stations in self.kinds.items()}
        self._counted = (self.delivered, self.wanted, self.resident)

    def result(self, seconds: float) -> Result:
        delivered, wanted, resident = self._counted
        busy = {
            kind: [
                (s.busy_s - before) / s.servers / seconds
                for s, before in zip(stations, self._before[kind], strict=True)
            ]
            for kind, stations in self.kinds.items()
        }
        pages, asked = self.delivered - delivered, self.wanted - wanted
        return Result(
            seconds,
            len(self.job_s),
            pages,
            (self.resident - resident) / asked if asked else 0.0,
            pages * self.fleet.page_bytes / seconds,
            self.job_s,
            self.probe_s,
            {kind: max(shares) for kind, shares in busy.items()},
            {kind: statistics.fmean(shares) for kind, shares in busy.items()},
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError when a law does not hold."""
        for stations in self.kinds.values():
            for station in stations:
                station.check_integrity()
        on_way = sum(sum(pod.due) for pod in self.pods)
        if self.asked != self.delivered + on_way:
            raise RuntimeError(f"{self.asked} pages asked for, {self.delivered} delivered, {on_way} on their way")
        for pod in self.pods:
            held_up = sum(map(len, pod.held_up))
            if pod.in_flight != sum(pod.due) + held_up or pod.in_flight > self.fleet.pages_in_flight:
                raise RuntimeError(f"pod {pod.number} has {pod.in_flight} pages in flight, {held_up} held up")
            if max(pod.due) > self.fleet.replies_due:
                raise RuntimeError(f"pod {pod.number} has more pages due from a node than its window allows")

    # ---- a request

    def _next_arrival(self, pod: _Pod) -> None:
        rate = self.load.requests_per_s
        self.clock.after(self._rng.expovariate(rate) if rate else 0.0, partial(self._arrive, pod))

    def _arrive(self, pod: _Pod) -> None:
        load, fleet, costs = self.load, self.fleet, self.fleet.costs
        if load.requests_per_s:
            self._next_arrival(pod)
        head = self._rng.choices(range(load.heads), cum_weights=self._weights)[0] if load.heads else 0
        pod.tails += 1
        tail = -(pod.number + pod.tails * fleet.pods) - 1
        names = [(head, page) for page in range(0 if self._use(pod, head, load.head_pages) else load.head_pages)]
        self._use(pod, tail, load.tail_pages)
        names += [(tail, page) for page in range(load.tail_pages)]
        total = load.head_pages + load.tail_pages
        self.wanted += total
        self.resident += total - len(names)
        job = _Job(
            self.clock.now, len(names), [zlib.crc32(b"%d %d" % name) % fleet.nodes for name in names], len(names)
        )
        seconds = costs.pod_s_per_job + job.keys * costs.pod_s_per_key
        pod.loop.serve(seconds, partial(self._probe, pod, job))

    def _use(self, pod: _Pod, prefix: int, pages: int) -> bool:
        """Say whether part of a prefix is in the pool, and have it there from now on."""
        load, pool = self.load, pod.pool
        if 0 <= prefix < load.pinned:
            return True
        if prefix in pool:
            pool.move_to_end(prefix)
            return True
        room = load.pool_pages - load.pinned * load.head_pages
        if pages <= room:
            pool[prefix] = pages
            pod.pooled += pages
            while pod.pooled > room:
                oldest = next(name for name in pool if not 0 <= name < load.pinned)
                pod.pooled -= pool.pop(oldest)
        return False

    def _probe(self, pod: _Pod, job: _Job) -> None:
        fleet, costs = self.fleet, self.fleet.costs
        shares: dict[Station, float] = {}
        if fleet.meta:
            shares = {self.meta[pod.number % fleet.meta]: job.keys * costs.meta_s_per_op}
        else:
            for node in job.pages:
                shares[self.nodes[node]] = shares.get(self.nodes[node], 0.0) + costs.node_s_per_key
        shares = shares if job.keys else {}
        open_ = len(shares)
        begin = self.clock.now

        def answered() -> None:
            nonlocal open_
            open_ -= 1
            if open_ <= 0:
                self.probe_s.append(self.clock.now - begin)
                self._read(pod, job)

        for station, seconds in shares.items():
            self.clock.after(fleet.round_trip_s, partial(station.serve, seconds, answered))
        if not shares:
            self._read(pod, job)

    def _read(self, pod: _Pod, job: _Job) -> None:
        pod.queue.extend((job, node) for node in job.pages)
        if job.pages:
            self._ask(pod)
        else:
            self._end(pod, job)

    def _end(self, pod: _Pod, job: _Job) -> None:
        self.job_s.append(self.clock.now - job.begin)
        if not self.load.requests_per_s:
            self._next_arrival(pod)

    # ---- a page

    def _ask(self, pod: _Pod) -> None:
        limit = self.fleet.pages_in_flight
        while pod.queue and pod.in_flight < limit:
            job, node = pod.queue.popleft()
            pod.in_flight += 1
            pod.held_up[node].append(job)
            self._ask_node(pod, node)

    def _ask_node(self, pod: _Pod, node: int) -> None:
        if not pod.held_up[node] or pod.due[node] >= self.fleet.replies_due:
            return
        job = pod.held_up[node].popleft()
        pod.due[node] += 1
        self.asked += 1
        fleet, costs, page = self.fleet, self.fleet.costs, self.fleet.page_bytes
        serve_s = costs.node_s_per_read + page / GIB * costs.node_s_per_gib

        def arrived() -> None:
            pod.link.serve(page / fleet.pod_link, received)

        def received() -> None:
            pod.readers.serve(page / GIB * costs.pod_s_per_gib, partial(self._delivered, pod, node, job))

        def sent() -> None:
            self.clock.after(fleet.round_trip_s, arrived)

        def served() -> None:
            self.node_links[node].serve(page / fleet.node_link, sent)

        if fleet.meta:
            self.meta[(pod.number + node) % fleet.meta].serve(costs.meta_s_per_op, served)
        else:
            self.nodes[node].serve(serve_s, served)

    def _delivered(self, pod: _Pod, node: int, job: _Job) -> None:
        self.delivered += 1
        pod.due[node] -= 1
        pod.in_flight -= 1
        self._ask_node(pod, node)
        self._ask(pod)
        job.left -= 1
        if not job.left:
            self._end(pod, job)
