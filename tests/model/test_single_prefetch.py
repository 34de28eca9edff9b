"""One prefetch at a time against the contract, computed from what was there before: every length, read and eviction."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from forestage.core.job import Outcome, Reason
from forestage.core.layout import Component, Covers
from model.oracle import check_shortfall, expect_plan, is_boundary, needed_keys
from support.engine_driver import EngineDriver, chain, model_of

PAGES = 12
FAILURES = st.sampled_from([Reason.VANISHED, Reason.CORRUPT, Reason.STORAGE_ERROR])


@dataclass(frozen=True)
class Ask:
    chain: int
    length: int
    device_pages: int
    min_pages: int
    release: bool


@st.composite
def worlds(draw: st.DrawFn, *, roomy: bool | None = None) -> tuple[EngineDriver, list[list[bytes]]]:
    windows = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 5]), min_size=0, max_size=2))
    parts = [
        Component(f"c{i}", 64, draw(st.integers(1, 4)), Covers.TAIL if window else Covers.EVERY_PAGE, window)
        for i, window in enumerate([0, *windows])
    ]
    roomy = draw(st.booleans()) if roomy is None else roomy
    capacities = [60 if roomy else draw(st.integers(1, 18)) for _ in parts]
    pinned_fraction = 1.0 if roomy else draw(st.sampled_from([1.0, 1.0, 0.6]))
    driver = EngineDriver(model_of(*parts), capacities, pinned_fraction=pinned_fraction)
    trunk = chain("t", PAGES)
    chains = [trunk, chain("b", PAGES, trunk[: draw(st.integers(0, PAGES))]), chain("o", PAGES)]
    places = sorted({(c, key) for c in range(len(parts)) for keys in chains for key in keys})
    absent = draw(st.sets(st.sampled_from(places), max_size=12))
    driver.stored = {place for place in places if place not in absent}
    driver.failing = draw(st.dictionaries(st.sampled_from(places), FAILURES, max_size=5))
    return driver, chains


ASKS = st.builds(
    Ask,
    chain=st.integers(0, 2),
    length=st.sampled_from([3, 7, 10, *[PAGES] * 5]),
    device_pages=st.sampled_from([0, 0, 0, 2, 5]),
    min_pages=st.sampled_from([1, 1, 1, 3, 8]),
    release=st.booleans(),
)


@settings(max_examples=250, deadline=None, derandomize=True, database=None)
@given(world=worlds(), asks=st.lists(ASKS, min_size=1, max_size=6))
def test_each_prefetch_gets_what_the_contract_says(
    world: tuple[EngineDriver, list[list[bytes]]], asks: list[Ask]
) -> None:
    driver, chains = world
    for ask in asks:
        _prefetch(driver, chains[ask.chain][: ask.length], min(ask.device_pages, ask.length), ask)


def _prefetch(driver: EngineDriver, keys: list[bytes], device_pages: int, ask: Ask) -> None:
    layout = driver.layout
    before = [driver.resident(c) for c in range(len(driver.logs))]
    free = [slots.free for slots in driver.pool.slots]
    evicted = [index.evicted for index in driver.pool.index]
    masks = [bytearray((c, key) in driver.stored for key in keys) for c in range(len(driver.logs))]
    expected = expect_plan(driver, keys, device_pages, masks)
    driver.reads.clear()

    job = driver.prefetch(keys, device_pages=device_pages, min_pages=ask.min_pages)

    lengths = job.lengths()
    assert (lengths.host, lengths.stored) == (expected.host, expected.stored)
    assert (lengths.restorable, lengths.granted) == (expected.restorable, expected.granted)
    check_shortfall(lengths, job.shortfall, granted=True, unavailable=False)
    needed = [set(of_component) for of_component in needed_keys(layout, keys, device_pages, expected.granted)]
    to_read = {(c, key) for c, of_component in enumerate(needed) for key in of_component - before[c]}

    assert len(set(driver.reads)) == len(driver.reads)
    if expected.granted - expected.usable < max(1, ask.min_pages):
        assert (lengths.ready, driver.reads) == (expected.usable, [])
        assert [index.evicted for index in driver.pool.index] == evicted
    elif not to_read & driver.failing.keys():
        assert lengths.ready == expected.granted
        assert set(driver.reads) == to_read
        assert job.count_pages() == (len({key for c, key in to_read if c in layout.every_page}), 0)
        for c, index in enumerate(driver.pool.index):
            wanted = sum(component == c for component, _ in to_read)
            assert index.evicted - evicted[c] == max(0, wanted - free[c])  # free slots first, and no more than needed
    else:
        best = _best_after_failures(driver, keys, device_pages, expected.granted, before)
        # With room to spare all that can be had is had; without, a job may fall back, but not below what it was told.
        assert (
            lengths.ready == best
            if min(driver.capacities) == 60 and driver.pinned_fraction == 1
            else lengths.ready <= best
        )
        assert is_boundary(layout, device_pages, lengths.ready, lambda c, page: keys[page] in driver.resident(c))
    if lengths.ready > device_pages:
        assert [tuple(shown) for shown in driver.shown(job)] == needed_keys(layout, keys, device_pages, lengths.ready)
        if ask.release:
            driver.release(job)
    else:
        assert job.outcome in {Outcome.MISS, Outcome.DECLINED, Outcome.COMPLETE}
    driver.check()


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    world=worlds(roomy=True),
    before=st.integers(0, PAGES),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 1 << 16)), max_size=40),
)
def test_a_prefetch_stopped_at_any_moment_settles_at_the_best_boundary_it_has_pages_for(
    world: tuple[EngineDriver, list[list[bytes]]], before: int, moves: list[tuple[bool, int]]
) -> None:
    """Reads begin and end in any order, then the job is told to finish; there is room, and time for the last read."""
    driver, (keys, *_) = world
    driver.engine.forget(driver.prefetch(keys[:before]).request.request_id, driver.now)
    resident = [driver.resident(c) for c in range(len(driver.logs))]
    job = driver.submit(keys)
    driver.answer_probes()
    for begin, index in moves:
        if begin:
            driver.begin_reads(index % 300)
        elif driver.in_flight:
            driver.end_read(driver.in_flight[index % len(driver.in_flight)])
    had, stopped = job.contiguous, not job.done
    driver.engine.stop(job, Reason.FINISHED, driver.now)
    driver.check()
    driver.run()
    assert not driver.engine.live
    if stopped:
        assert job.ready == _best_after_failures(driver, keys, 0, min(had, job.granted), resident)


def _best_after_failures(
    driver: EngineDriver, keys: list[bytes], device_pages: int, granted: int, before: list[set[bytes]]
) -> int:
    """Return the largest boundary within the grant whose pages are resident or can be read whole."""

    def good(c: int, page: int) -> bool:
        where = (c, keys[page])
        return keys[page] in before[c] or (where in driver.stored and where not in driver.failing)

    length = best = device_pages
    while length < granted and all(good(c, length) for c in driver.layout.every_page):
        length += 1
        if is_boundary(driver.layout, device_pages, length, good):
            best = length
    return best
