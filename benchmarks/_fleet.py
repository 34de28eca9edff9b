"""A fleet of services on one L3: what there is, what is asked of it, and what it can take by plain arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

__all__ = ["GIB", "Costs", "Fleet", "Load", "Result", "capacities", "percentile"]

GIB = 1 << 30
_LARGE_REPLIES_BYTES = 16 << 20
_AROUND_BYTES = 4 << 20  # of one batch, and of small replies due from a node


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of work, each on one thread; `docs/scaling.md` says where each figure comes from."""

    pod_s_per_gib: float  # a reader: receive, verify, put into the slot
    pod_s_per_key: float  # the event loop: one key of a probe, encoded and answered
    pod_s_per_job: float  # the event loop: HTTP, engine
    node_s_per_gib: float  # Redis: bytes out to the socket
    node_s_per_read: float  # Redis: one GET
    node_s_per_key: float  # Redis: one EXISTS
    meta_s_per_op: float = 0.0  # a metadata server: one name looked up

    def times(self, factor: float) -> "Costs":
        """Return the same on slower processors."""
        return Costs(*(getattr(self, each.name) * factor for each in fields(self)))


@dataclass(frozen=True, slots=True)
class Fleet:
    """What there is. Links are in bytes a second, one direction.

    With `meta` servers it is a shared file system: they answer probes and every open, and `nodes` only carry data.
    With `host_cores` all pods and nodes share these cores, as on one machine.
    """

    pods: int
    nodes: int
    costs: Costs
    page_bytes: int
    node_link: float = 12.5e9
    pod_link: float = 12.5e9
    round_trip_s: float = 0.0002
    connections: int = 4
    pod_cores: int = 4
    meta: int = 0
    host_cores: int = 0

    @property
    def readers(self) -> int:
        """Connections of a pod to a node that read at once."""
        return min(self.connections, (self.host_cores or self.pod_cores) + 1)

    @property
    def links_per_node(self) -> int:
        """Connections that a node of Redis has: readers, two for probes, two for writes, of every pod."""
        return self.pods * (self.readers + 4)

    @property
    def pages_in_flight(self) -> int:
        """Pages that a pod has on their way at most."""
        return (self.readers + 2) * max(1, _AROUND_BYTES // self.page_bytes)

    @property
    def replies_due(self) -> int:
        """Pages that a pod has on their way from one node at most: one a connection, or as many as fit its window."""
        large = min(self.readers, max(2, _LARGE_REPLIES_BYTES // self.page_bytes))
        return max(large, _AROUND_BYTES // self.page_bytes)


@dataclass(frozen=True, slots=True)
class Load:
    """What each pod is asked for: prefixes with a head that many share, and a tail of their own, in pages.

    `requests_per_s` of a pod, at random moments; 0 for one after another, each as soon as the last one is done.
    Heads are drawn with weights 1/rank**skew. The pool holds `pool_pages`, least recently used last; the first `pinned`
    heads are there from the start and stay.
    """

    requests_per_s: float
    head_pages: int
    tail_pages: int
    heads: int = 100
    skew: float = 1.0
    pool_pages: int = 0
    pinned: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """What came of it, from the end of the warm-up to the end. Shares of time are those of the busiest of its kind."""

    seconds: float
    jobs: int
    pages: int
    resident_share: float
    bytes_per_s: float
    job_s: Sequence[float]
    probe_s: Sequence[float]
    busy: dict[str, float]
    busy_mean: dict[str, float]

    @property
    def first_limit(self) -> str:
        """The kind of resource that is nearest to its limit."""
        return max(self.busy, key=self.busy.__getitem__)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that so many are not above; NaN of none."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else float("nan")


def capacities(fleet: Fleet, probed: float, loaded: float) -> dict[str, float]:
    """Return how many requests a second of the whole fleet each kind of resource can take, work evenly spread.

    A request probes so many keys and loads so many pages, on average.
    """
    costs, gib = fleet.costs, fleet.page_bytes / GIB
    probe_s, read_s = probed * costs.node_s_per_key, loaded * (costs.node_s_per_read + gib * costs.node_s_per_gib)
    work = {
        "node link": loaded * fleet.page_bytes / fleet.node_link / fleet.nodes,
        "pod link": loaded * fleet.page_bytes / fleet.pod_link / fleet.pods,
        "pod readers": loaded * gib * costs.pod_s_per_gib / min(fleet.readers, fleet.pod_cores) / fleet.pods,
        "pod loop": (costs.pod_s_per_job + probed * costs.pod_s_per_key) / fleet.pods,
    }
    if fleet.meta:
        work["metadata"] = (probed + loaded) * costs.meta_s_per_op / fleet.meta
    else:
        work["node thread"] = (probe_s + read_s) / fleet.nodes
    return {kind: 1 / seconds if seconds else float("inf") for kind, seconds in work.items()}
