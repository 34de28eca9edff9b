"""Hit lengths and shortfall, without any I/O."""

from itertools import product

import pytest

from forestage.core.job import JobState, Lengths, Outcome, Reason
from forestage.core.layout import Component, Covers
from support.engine_driver import EngineDriver, chain, kv_model, model_of


@pytest.mark.parametrize("present", list(product([0, 1], repeat=4)))
def test_presence_patterns_of_four_pages(present: tuple[int, ...]) -> None:
    keys = chain("a", 4)
    driver = EngineDriver(kv_model(), [8])
    driver.store([key for key, there in zip(keys, present, strict=True) if there])
    job = driver.prefetch(keys)
    leading = (*present, 0).index(0)
    assert job.lengths() == Lengths(4, 0, leading, leading, leading, leading)
    assert driver.resident() == set(keys[:leading])
    assert driver.pool.slots[0].free == 8 - leading
    assert [key for _, key in driver.reads] == keys[:leading]


@pytest.mark.parametrize(("failure", "outcome"), [(Reason.VANISHED, 5), (Reason.CORRUPT, 5), (Reason.STORAGE_ERROR, 5)])
def test_eight_promised_and_page_five_fails_at_the_read(failure: Reason, outcome: int) -> None:
    keys = chain("a", 8)
    driver = EngineDriver(kv_model(), [8])
    driver.store(keys)
    driver.failing[0, keys[5]] = failure
    job = driver.prefetch(keys)
    assert (job.lengths(), job.shortfall) == (Lengths(8, 0, 8, 8, 8, outcome), {failure: 3})
    assert driver.resident() == set(keys[:5])


@pytest.mark.parametrize("pages", [7, 8, 9, 63, 64, 65, 127, 128, 129])
def test_lengths_around_powers_of_two(pages: int) -> None:
    keys = chain("a", pages)
    driver = EngineDriver(kv_model(), [256])
    driver.store(keys)
    job = driver.prefetch([*keys, *chain("unknown", 3)])
    assert job.lengths() == Lengths(pages + 3, 0, pages, pages, pages, pages)
    assert driver.shown(job) == [keys]


def test_one_component_of_one_page_missing() -> None:
    keys = chain("a", 8)
    driver = EngineDriver(model_of(Component("kv", 64), Component("indexer", 64)), [8, 8])
    driver.store(keys)
    driver.stored.discard((1, keys[5]))
    job = driver.prefetch(keys)
    assert (job.lengths(), job.shortfall) == (Lengths(8, 0, 5, 5, 5, 5), {Reason.NOT_STORED: 3})
    assert driver.shown(job) == [keys[:5], keys[:5]]


def test_two_components_that_fail_at_different_pages() -> None:
    keys = chain("a", 8)
    driver = EngineDriver(model_of(Component("kv", 64), Component("indexer", 64)), [8, 8])
    driver.store(keys)
    driver.failing = {(0, keys[6]): Reason.CORRUPT, (1, keys[3]): Reason.VANISHED}
    job = driver.submit(keys)
    driver.answer_probes()
    driver.begin_all_reads()
    driver.end_read(driver.flight(keys[6]))
    assert job.shortfall == {}
    driver.end_read(driver.flight(keys[3], 1))
    driver.run()
    assert (job.ready, job.shortfall) == (3, {Reason.VANISHED: 5})
    assert driver.resident(0) == driver.resident(1) == set(keys[:3])


@pytest.mark.parametrize(
    ("device_pages", "lengths", "outcome"),
    [
        (3, Lengths(8, 3, 5, 5, 5, 5), Outcome.PARTIAL),
        (4, Lengths(8, 4, 5, 5, 5, 5), Outcome.PARTIAL),
        (5, Lengths(8, 5, 5, 5, 5, 5), Outcome.MISS),
        (6, Lengths(8, 6, 6, 6, 6, 6), Outcome.MISS),
        (8, Lengths(8, 8, 8, 8, 8, 8), Outcome.COMPLETE),
    ],
)
def test_device_pages_around_what_is_stored(device_pages: int, lengths: Lengths, outcome: Outcome) -> None:
    keys = chain("a", 8)
    driver = EngineDriver(kv_model(), [8])
    driver.store(keys[:5])
    job = driver.prefetch(keys, device_pages=device_pages)
    assert (job.lengths(), job.outcome) == (lengths, outcome)
    assert [key for _, key in driver.reads] == keys[device_pages:5]
    assert sum(job.shortfall.values()) == 8 - lengths.ready


def test_a_resident_head_is_not_read_again() -> None:
    keys = chain("a", 8)
    driver = EngineDriver(kv_model(), [8])
    driver.store(keys)
    driver.release(driver.prefetch(keys[:3]))
    driver.reads.clear()
    job = driver.prefetch(keys)
    assert [key for _, key in driver.reads] == keys[3:]
    assert (job.host, job.count_pages()) == (3, (5, 0))


def test_what_is_resident_asks_nobody() -> None:
    keys = chain("a", 4)
    driver = EngineDriver(kv_model(), [4])
    driver.store(keys)
    driver.release(driver.prefetch(keys))
    job = driver.submit(keys)
    assert not driver.engine.probes
    assert (job.done, job.outcome, job.lengths()) == (True, Outcome.COMPLETE, Lengths(4, 4, 4, 4, 4, 4))


@pytest.mark.parametrize(("pages", "device_pages"), [(0, 0), (3, 3)])
def test_nothing_to_bring_is_complete(pages: int, device_pages: int) -> None:
    driver = EngineDriver(kv_model(windows=[1]), [4, 1])
    job = driver.submit(chain("a", pages), device_pages=device_pages)
    assert (job.done, job.outcome, job.lease, job.shortfall) == (True, Outcome.COMPLETE, None, {})


def test_without_l3_what_is_resident_is_still_given() -> None:
    keys = chain("a", 8)
    driver = EngineDriver(kv_model(), [8])
    driver.store(keys)
    driver.release(driver.prefetch(keys[:3]))
    job = driver.submit(keys)
    driver.engine.probe_answered(driver.engine.probes.popleft(), None, driver.now)
    assert (job.lengths(), job.outcome) == (Lengths(8, 3, 3, 3, 3, 3), Outcome.PARTIAL)
    assert job.shortfall == {Reason.STORAGE_UNAVAILABLE: 5}
    assert driver.shown(job) == [keys[:3]]


@pytest.mark.parametrize(
    ("resident", "unasked_from", "reason"),
    [
        (0, 5, Reason.STORAGE_UNAVAILABLE),
        (0, 6, Reason.NOT_STORED),
        (6, 5, Reason.NOT_STORED),
        (6, 6, Reason.STORAGE_UNAVAILABLE),
    ],
)
def test_where_a_part_of_l3_is_silent_the_rest_is_unavailable(resident: int, unasked_from: int, reason: Reason) -> None:
    keys = chain("a", 8)
    driver = EngineDriver(kv_model(), [8])
    driver.store(keys)
    if resident:
        driver.release(driver.prefetch(keys[:resident]))
    job = driver.submit(keys)
    masks = [bytearray(b"\1" * 5 + b"\0" * 3)]
    driver.engine.probe_answered(driver.engine.probes.popleft(), masks, driver.now, unasked_from)
    driver.run()
    length = max(resident, 5)
    assert (job.ready, job.shortfall) == (length, {reason: 8 - length})


def test_without_l3_the_reads_of_others_still_count() -> None:
    keys = chain("a", 8)
    driver = EngineDriver(kv_model(), [8])
    driver.store(keys)
    leader = driver.submit(keys[:6])
    driver.answer_probes()
    follower = driver.submit(keys)
    driver.engine.probe_answered(driver.engine.probes.popleft(), None, driver.now)
    assert (follower.stored, follower.granted, follower.state) == (6, 6, JobState.LOADING)
    driver.run()
    assert (follower.ready, follower.shortfall) == (6, {Reason.STORAGE_UNAVAILABLE: 2})
    assert (leader.count_pages(), follower.count_pages()) == ((6, 0), (0, 6))


def test_a_late_answer_changes_nothing() -> None:
    keys = chain("a", 4)
    driver = EngineDriver(kv_model(), [4])
    driver.store(keys)
    job = driver.submit(keys)
    asked = driver.engine.probes.popleft()
    masks = driver.masks(asked)
    driver.engine.stop(job, Reason.FINISHED, driver.now)
    lengths = job.lengths()
    driver.engine.probe_answered(asked, masks, driver.now)
    assert (job.lengths(), job.shortfall) == (lengths, {Reason.FINISHED: 4})
    driver.check()


@pytest.mark.parametrize(
    ("min_pages", "ready", "outcome", "shortfall"),
    [
        (4, 12, Outcome.COMPLETE, {}),
        (5, 8, Outcome.PARTIAL, {Reason.BELOW_MIN_PAGES: 4}),
        (0, 12, Outcome.COMPLETE, {}),
    ],
)
def test_min_pages_looks_at_the_gain(
    min_pages: int, ready: int, outcome: Outcome, shortfall: dict[Reason, int]
) -> None:
    keys = chain("a", 12)
    driver = EngineDriver(kv_model(), [12])
    driver.store(keys)
    driver.release(driver.prefetch(keys[:8]))
    driver.reads.clear()
    job = driver.prefetch(keys, min_pages=min_pages)
    assert (job.granted, job.ready, job.outcome, job.shortfall) == (12, ready, outcome, shortfall)
    assert len(driver.reads) == ready - 8


def test_a_gain_that_is_too_small_for_a_cold_prefix_is_declined() -> None:
    driver = EngineDriver(kv_model(), [12])
    driver.store(chain("a", 3))
    job = driver.prefetch(chain("a", 12), min_pages=4)
    assert (job.outcome, job.lease) == (Outcome.DECLINED, None)
    assert job.shortfall == {Reason.NOT_STORED: 9, Reason.BELOW_MIN_PAGES: 3}
    assert driver.resident() == set()


def test_host_may_exceed_what_is_restorable() -> None:
    keys = chain("a", 8)
    driver = EngineDriver(kv_model(windows=[1]), [8, 2])
    driver.store(keys, [(1, [8])])
    driver.release(driver.prefetch(keys))
    driver.lose(keys[7], 1)
    driver.stored.discard((1, keys[7]))
    job = driver.prefetch(keys)
    assert (job.lengths(), job.outcome) == (Lengths(8, 8, 8, 0, 0, 0), Outcome.MISS)
    assert job.shortfall == {Reason.NO_BOUNDARY: 8}


def test_tails_of_different_windows_must_agree() -> None:
    keys = chain("a", 12)
    layout = model_of(
        Component("kv", 64),
        Component("mamba", 64, covers=Covers.TAIL, window=1),
        Component("swa", 64, covers=Covers.TAIL, window=3),
    )
    driver = EngineDriver(layout, [12, 2, 6])
    driver.store(keys, [(1, [4, 8, 11]), (2, [5, 6, 7, 8, 10, 11, 12])])
    job = driver.prefetch(keys)
    assert job.lengths() == Lengths(12, 0, 12, 8, 8, 8)
    assert driver.shown(job) == [keys[:8], keys[7:8], keys[5:8]]


def test_measuring_says_what_a_prefetch_then_gets_and_changes_nothing() -> None:
    keys = chain("a", 12)
    driver = EngineDriver(kv_model(windows=[2]), [8, 4])
    driver.store(keys, [(1, [3, 4, 7, 8, 11, 12])])
    driver.release(driver.prefetch(keys[:4]))
    order = list(driver.pool.index[0]._orders.slots(0))
    masks = [bytearray((c, key) in driver.stored for key in keys) for c in range(2)]
    plan = driver.engine.measure("m", keys, 0, masks)
    assert (plan.host, plan.stored, plan.restorable, plan.granted, plan.usable) == (4, 12, 12, 8, 4)
    assert list(driver.pool.index[0]._orders.slots(0)) == order
    job = driver.prefetch(keys)
    assert (job.host, job.stored, job.restorable, job.granted) == (4, 12, 12, 8)
