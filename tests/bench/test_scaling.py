"""The simulation of a fleet against what is known without one: conservation, full resources, queues in closed form."""

import random
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _fleet import GIB, Costs, Fleet, Load, capacities, percentile
from _fleet_run import simulate
from _station import Clock, Station

FREE = Costs(0, 0, 0, 0, 0, 0)
MIB = 1 << 20
ENDLESS = 1e18  # bytes a second


def fleet(**settings: object) -> Fleet:
    """Return a fleet in which nothing costs any time but what is set."""
    plain = Fleet(2, 1, FREE, MIB, ENDLESS, ENDLESS, 0.0)
    return replace(plain, **settings)  # type: ignore[arg-type]


# ---- stations


def test_a_station_serves_in_order_and_no_more_at_once_than_it_has_servers() -> None:
    clock, ends = Clock(), []
    station = Station(clock, 2)
    for name, seconds in (("a", 3.0), ("b", 1.0), ("c", 1.0), ("d", 1.0)):
        station.serve(seconds, lambda name=name: ends.append((name, clock.now)))  # type: ignore[misc]
    assert station.waiting == 2
    clock.run(10.0)
    assert ends == [("b", 1.0), ("c", 2.0), ("a", 3.0), ("d", 3.0)]
    assert (station.busy_s, station.taken, station.served) == (6.0, 4, 4)
    station.check_integrity()


def test_threads_share_the_cores_that_they_run_on() -> None:
    clock, ends = Clock(), []
    cores = Station(clock, 2)
    for _ in range(4):
        Station(clock, 1, cores).serve(1.0, lambda: ends.append(clock.now))
    clock.run(10.0)
    assert ends == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("busy", [0.3, 0.7, 0.9])
def test_waiting_is_that_of_random_arrivals_and_even_work(busy: float) -> None:
    """For Poisson arrivals and constant service s the mean wait is s * busy / (2 * (1 - busy))."""
    clock, rng = Clock(), random.Random(1)
    station, waits = Station(clock), []

    def done(begin: float) -> None:
        waits.append(clock.now - begin - 1.0)

    at = 0.0
    for _ in range(60_000):
        at += rng.expovariate(busy)
        clock.after(at, lambda: station.serve(1.0, partial(done, clock.now)))
    clock.run(at * 2)
    assert sum(waits) / len(waits) == pytest.approx(busy / (2 * (1 - busy)), rel=0.08)


# ---- fleets


@given(
    st.builds(
        Fleet,
        pods=st.integers(1, 4),
        nodes=st.integers(1, 5),
        costs=st.just(Costs(0.5, 1e-6, 1e-3, 0.4, 2e-5, 1e-6, 1e-4)),
        page_bytes=st.sampled_from([64 << 10, MIB, 9 * MIB]),
        connections=st.integers(1, 6),
        meta=st.integers(0, 2),
        host_cores=st.integers(0, 2),
    ),
    st.builds(
        Load,
        requests_per_s=st.sampled_from([0.0, 5.0]),
        head_pages=st.integers(0, 8),
        tail_pages=st.integers(1, 8),
        heads=st.integers(1, 5),
        pool_pages=st.integers(0, 60),
        pinned=st.integers(0, 1),
    ),
    st.integers(0, 3),
)
def test_pages_are_conserved_and_windows_kept_and_a_seed_says_all(of: Fleet, load: Load, seed: int) -> None:
    seen = simulate(of, load, 0.2, warm_up=0.1, seed=seed)  # checks its laws at the end
    assert seen == simulate(of, load, 0.2, warm_up=0.1, seed=seed)
    assert seen.bytes_per_s == pytest.approx(seen.pages * of.page_bytes / 0.2)
    assert 0 <= seen.resident_share <= 1
    # Of one thread no more than all, but for a service that began at the end and is counted whole.
    assert all(share < 1.6 for share in seen.busy_mean.values())


@pytest.mark.parametrize(
    ("settings", "bytes_per_s"),
    [
        ({"costs": replace(FREE, node_s_per_gib=0.5)}, 2 * GIB),  # one thread of one node
        ({"costs": replace(FREE, node_s_per_read=0.01)}, 100 * MIB),
        ({"costs": replace(FREE, pod_s_per_gib=1.0), "connections": 1}, 2 * GIB),  # two pods, a thread each
        ({"costs": replace(FREE, pod_s_per_gib=1.0), "connections": 3}, 6 * GIB),
        ({"costs": replace(FREE, pod_s_per_gib=1.0), "connections": 8, "pod_cores": 2}, 4 * GIB),
        ({"node_link": 1e9}, 1e9),
        ({"pod_link": 1e9}, 2e9),
        ({"meta": 1, "costs": replace(FREE, meta_s_per_op=0.005)}, 100 * MIB),  # of each page a probe and an open
        ({"host_cores": 2, "costs": replace(FREE, node_s_per_gib=0.25, pod_s_per_gib=0.75)}, 2 * GIB),
    ],
)
def test_a_fleet_is_as_fast_as_its_slowest_part(settings: dict[str, object], bytes_per_s: float) -> None:
    # Enough to do at any moment, so that the slowest part never waits.
    seen = simulate(fleet(**settings), Load(0.0, 0, 64), 20.0, warm_up=2.0)
    assert seen.bytes_per_s == pytest.approx(bytes_per_s, rel=0.04)
    assert max(seen.busy.values()) == pytest.approx(1.0, abs=0.04)


@pytest.mark.parametrize("nodes", [1, 3])
def test_busy_shares_are_arrivals_times_work(nodes: int) -> None:
    costs = Costs(0.3, 1e-6, 1e-3, 0.4, 2e-5, 1e-6)
    of, load = fleet(pods=10, nodes=nodes, costs=costs, node_link=4e9, pod_link=2e9), Load(2.0, 0, 64)
    seen = simulate(of, load, 60.0, warm_up=5.0)
    for kind, bound in capacities(of, 64, 64).items():
        assert seen.busy_mean[kind] == pytest.approx(seen.jobs / 60.0 / bound, rel=0.05), kind
    assert seen.jobs / 60.0 == pytest.approx(20.0, rel=0.1)


def test_what_is_asked_beyond_the_bound_is_not_done() -> None:
    of, load = fleet(pods=10, costs=replace(FREE, node_s_per_gib=1.0)), Load(5.0, 0, 64)
    bound = capacities(of, 64, 64)["node thread"]
    assert bound == pytest.approx(16.0)
    seen = simulate(of, load, 10.0, warm_up=5.0)
    assert seen.jobs / 10.0 < 1.1 * bound
    assert seen.first_limit == "node thread"
    assert seen.bytes_per_s == pytest.approx(GIB, rel=0.02)


def test_a_window_bounds_what_waits_at_a_node() -> None:
    """A probe waits for at most what all pods may have due from the node."""
    of = fleet(pods=20, costs=replace(FREE, node_s_per_gib=1.0, node_s_per_key=1e-6))
    seen = simulate(of, Load(0.0, 0, 32), 10.0, warm_up=2.0)
    bound = 20 * of.replies_due * MIB / GIB
    assert 0.5 * bound < percentile(seen.probe_s, 0.99) <= bound + 0.01


def test_one_job_alone_takes_what_its_steps_take() -> None:
    costs = Costs(pod_s_per_gib=0, pod_s_per_key=0, pod_s_per_job=0.001, node_s_per_gib=0, node_s_per_read=0.002,
                  node_s_per_key=0.0005)  # fmt: skip
    of = fleet(pods=1, costs=costs, round_trip_s=0.01, page_bytes=64 << 20)
    seen = simulate(of, Load(0.0, 0, 1, heads=0), 1.0)
    # The job, to the node and back for the probe in one go, the key, the page, and its way back.
    assert percentile(seen.job_s, 0.5) == pytest.approx(0.001 + 0.01 + 0.0005 + 0.002 + 0.01)
    assert percentile(seen.probe_s, 0.5) == pytest.approx(0.01 + 0.0005)


def test_pinned_heads_are_never_read_and_others_as_the_pool_allows() -> None:
    of = fleet(pods=1)
    shares = [
        simulate(of, Load(20.0, 10, 10, heads=20, pool_pages=pool, pinned=pinned), 200.0, warm_up=50.0).resident_share
        for pool, pinned in ((10, 0), (110, 0), (110, 8), (220, 20))
    ]
    weights = [1 / rank for rank in range(1, 21)]
    assert shares[0] < 0.05
    assert shares[0] < shares[1] < shares[2] < shares[3]
    assert shares[2] >= 0.5 * sum(weights[:8]) / sum(weights) - 0.01
    assert shares[3] == pytest.approx(0.5)


def test_costs_on_a_slower_processor_are_all_larger() -> None:
    assert Costs(1, 2, 3, 4, 5, 6, 7).times(2) == Costs(2, 4, 6, 8, 10, 12, 14)
