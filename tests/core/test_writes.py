"""Writes in the pure engine: what gets a slot, what a commit does, when slots and marks come back."""

import pytest

from forestage.core.engine import EngineSettings
from forestage.core.errors import ConflictError, GoneError, NotFoundError, StoppingError
from forestage.core.job import Outcome, Reason
from forestage.core.write import WriteReason, WriteResult, WriteSettings
from forestage.core.write_parts import Share
from support.engine_driver import EngineDriver, chain, kv_model

KEYS = chain("a", 8)
OTHER = chain("b", 8)


def _driver(slots: int = 16, *, windows: tuple[int, ...] = (), reserve: float = 0.0, **limits: float) -> EngineDriver:
    writes = WriteSettings(**{"max_dirty_fraction": 1.0, **limits})  # type: ignore[arg-type]
    settings = EngineSettings(1 << 40, writes=writes)
    layout = kv_model(windows=windows)
    return EngineDriver(layout, [slots] * len(layout.components), settings, write_reserve=reserve)


def _results(driver: EngineDriver) -> dict[str, int]:
    return {result.value: pages for result, pages in driver.engine.writes.results.items() if pages}


def test_a_write_is_seen_once_it_is_committed_and_becomes_durable_in_order() -> None:
    driver = _driver()
    write = driver.begin_write(KEYS)
    assert (write.granted, write.reason, write.stored) == (8, None, ())
    assert sorted(slot for slot in write.slots_of(0) if slot is not None) == sorted(driver.logs[0].lent)
    driver.check()
    assert driver.resident() == set()
    slots = write.slots_of(0)
    driver.commit(write)
    driver.check()
    assert [driver.logs[0].visible[slot] for slot in slots if slot is not None] == KEYS
    assert (write.committed, write.durable, write.failed, write.duplicate) == (8, 0, 0, 0)
    driver.store_next()
    assert driver.stored == {(0, KEYS[0])}
    assert (write.durable, write.settled, len(driver.logs[0].dirty)) == (1, False, 7)
    driver.store_all()
    assert (write.durable, write.settled, driver.logs[0].dirty) == (8, True, set())
    assert list(driver.engine.writes.settled) == [write]
    assert driver.pool.index[0].held == 0
    assert _results(driver) == {"durable": 8}


def test_a_committed_write_stays_known_for_a_while_and_commits_only_once() -> None:
    driver = _driver(keep_done_s=60.0)
    write = driver.write(KEYS)
    assert driver.commit(write) is write
    driver.store_all()
    assert driver.commit(write) is write
    assert write.committed == 8
    driver.advance(59.0)
    assert driver.engine.writes.find(write.id, driver.now) is write
    driver.advance(1.0)
    with pytest.raises(NotFoundError, match="unknown"):
        driver.engine.writes.find(write.id, driver.now)
    driver.check_idle()


def test_what_is_resident_or_stored_gets_no_slot() -> None:
    driver = _driver(windows=(1,))
    driver.store(KEYS[:4], [(1, [2])])
    driver.prefetch(KEYS[:2])
    write = driver.begin_write(KEYS, {1: [7, 1, 3]})
    assert write.slots_of(0)[:4] == [None] * 4
    assert None not in write.slots_of(0)[4:]
    seven, one, three = write.slots_of(1)
    assert (one, seven is None, three is None) == (None, False, False)
    assert write.stored == (0, 1, 2)  # the state of page 3 is new
    driver.commit(write)
    assert (write.committed, write.duplicate) == (5, 0)
    assert _results(driver) == {"stored": 3}
    driver.store_all()
    assert (write.durable, write.failed) == (5, 0)


def test_everything_counts_as_new_when_l3_cannot_be_asked() -> None:
    driver = _driver()
    driver.store(KEYS)
    assert driver.begin_write(KEYS, asked=False).stored == ()
    assert driver.begin_write(KEYS).stored == tuple(range(8))


def test_pages_without_a_slot_are_cut_at_a_prefix_and_say_why() -> None:
    driver = _driver(4)
    write = driver.begin_write(KEYS)
    assert (write.granted, write.reason) == (4, WriteReason.HOST_CAPACITY)
    assert write.slots_of(0)[4:] == [None] * 4
    again = driver.begin_write(OTHER)
    assert (again.granted, again.reason, again.reserved) == (0, WriteReason.BACK_PRESSURE, 0)
    assert _results(driver) == {"refused": 12}
    driver.check()


def test_a_prefix_is_cut_where_its_first_component_does_not_fit() -> None:
    driver = EngineDriver(kv_model(windows=[1]), [16, 2], EngineSettings(1 << 40, writes=WriteSettings(1.0)))
    write = driver.begin_write(KEYS, {1: [1, 3, 5]})
    assert (write.granted, write.reserved) == (5, 5)
    assert write.slots_of(0)[5:] == [None] * 3
    assert [slot is None for slot in write.slots_of(1)] == [False, False, True]


def test_back_pressure_lasts_until_l3_has_what_was_written() -> None:
    driver = _driver(16, max_dirty_fraction=0.5)
    first = driver.begin_write(KEYS)
    assert first.granted == 8
    refused = driver.begin_write(OTHER)
    assert (refused.granted, refused.reason) == (0, WriteReason.BACK_PRESSURE)
    driver.commit(first)
    assert driver.begin_write(OTHER).granted == 0
    for _ in range(3):
        driver.store_next()
    some = driver.begin_write(OTHER)
    assert (some.granted, some.reason) == (3, WriteReason.BACK_PRESSURE)
    driver.check()


def test_a_write_evicts_others_pages_but_none_that_it_names() -> None:
    driver = _driver(8)
    driver.store(KEYS[:4])
    driver.store(OTHER[:4])
    for keys in (KEYS[:4], OTHER[:4]):
        driver.release(driver.prefetch(keys))
    driver.stored.clear()  # so that residence alone makes the difference
    write = driver.begin_write(KEYS)
    assert (write.stored, write.granted) == ((0, 1, 2, 3), 8)
    assert driver.resident() == set(KEYS[:4])
    driver.check()


def test_a_prefix_longer_than_the_pool_is_written_piece_by_piece() -> None:
    driver, keys = _driver(8), chain("long", 30)
    for _ in range(4):
        write = driver.write(keys)
        driver.store_all()
        driver.check()
    assert {key for _, key in driver.stored} == set(keys)
    assert write.stored == tuple(range(24))
    assert driver.resident() >= set(keys[24:])
    assert driver.begin_write(keys).stored == tuple(range(30))


def test_pages_in_use_leave_no_room() -> None:
    driver = _driver(8)
    driver.store(OTHER)
    driver.prefetch(OTHER[:6])
    write = driver.begin_write(KEYS)
    assert (write.granted, write.reason) == (2, WriteReason.HOST_CAPACITY)


# ---- the ends of a reservation


def test_dropping_gives_the_slots_back_at_once() -> None:
    driver = _driver(8)
    write = driver.begin_write(KEYS)
    for _ in range(2):
        driver.engine.writes.drop(write.id, driver.now)
        driver.check()
        assert driver.pool.slots[0].free == 8
    with pytest.raises(NotFoundError):
        driver.commit(write)
    assert _results(driver) == {"dropped": 8}
    driver.check_idle()


def test_an_expired_write_cannot_be_committed_and_its_slots_come_back_after_the_margin() -> None:
    driver = _driver(8, expire_s=30.0, margin_s=5.0, keep_done_s=60.0)
    write = driver.begin_write(KEYS)
    driver.now += 30.0
    with pytest.raises(GoneError):
        driver.commit(write)  # the clock has not been looked at
    driver.advance(0.0)
    with pytest.raises(GoneError):
        driver.commit(write)
    driver.advance(4.9)
    assert driver.pool.slots[0].filling == 8
    driver.advance(0.1)
    assert driver.pool.slots[0].free == 8
    with pytest.raises(GoneError):
        driver.commit(write)
    assert _results(driver) == {"expired": 8}
    driver.advance(60.0)
    with pytest.raises(NotFoundError):
        driver.commit(write)
    driver.check_idle()


def test_a_late_drop_gives_the_slots_back_before_the_margin_is_over() -> None:
    driver = _driver(8)
    write = driver.begin_write(KEYS)
    driver.advance(30.0)
    driver.engine.writes.drop(write.id, driver.now)
    assert driver.pool.slots[0].free == 8
    assert _results(driver) == {"expired": 8}
    driver.check_idle()


def test_dropping_a_committed_write_only_forgets_it() -> None:
    driver = _driver()
    write = driver.write(KEYS)
    driver.engine.writes.drop(write.id, driver.now)
    with pytest.raises(NotFoundError):
        driver.engine.writes.find(write.id, driver.now)
    driver.check()
    driver.store_all()
    assert driver.stored == {(0, key) for key in KEYS}
    driver.check_idle()


def test_no_write_begins_while_the_service_stops_but_open_ones_are_committed() -> None:
    driver = _driver()
    write = driver.begin_write(KEYS)
    driver.engine.stop_all(driver.now)
    with pytest.raises(StoppingError):
        driver.begin_write(OTHER)
    assert driver.commit(write).committed == 8
    driver.store_all()
    assert write.durable == 8


# ---- duplicates


def test_of_two_writes_of_the_same_pages_the_first_to_commit_counts() -> None:
    driver = _driver()
    first, second = driver.begin_write(KEYS), driver.begin_write(KEYS[:4])
    driver.commit(second)
    driver.commit(first)
    assert (second.committed, second.duplicate) == (4, 0)
    assert (first.committed, first.duplicate) == (4, 4)
    driver.check()
    driver.store_all()
    assert (first.durable, second.durable) == (4, 4)
    assert _results(driver) == {"durable": 8, "duplicate": 4}


def test_a_write_of_duplicates_alone_is_settled_at_once() -> None:
    driver = _driver()
    first, second = driver.begin_write(KEYS), driver.begin_write(KEYS)
    driver.commit(first)
    assert driver.commit(second).settled
    assert (second.committed, second.duplicate, second.durable) == (0, 8, 0)
    assert driver.pool.slots[0].free == 8


def test_a_page_that_a_prefetch_brought_meanwhile_is_a_duplicate() -> None:
    driver = _driver()
    write = driver.begin_write(KEYS, asked=False)
    driver.store(KEYS[:3])
    job = driver.prefetch(KEYS)
    driver.commit(write)
    assert (job.ready, write.duplicate, write.committed) == (3, 3, 5)
    assert driver.shown(job) == [KEYS[:3]]
    driver.check()


# ---- prefetches beside it


@pytest.mark.parametrize("begun", [0, 2, 4])
@pytest.mark.parametrize("end", ["well", "failed", "untouched", "stalled"])
def test_a_commit_gives_its_pages_to_those_that_are_reading_them(begun: int, end: str) -> None:
    driver = _driver(32)
    write = driver.begin_write(KEYS, asked=False)
    driver.store(KEYS)
    jobs = [driver.submit(KEYS[:4]), driver.submit(KEYS)]
    driver.answer_probes()
    for _ in range(begun):
        driver.begin_reads()
    reads = tuple(driver.in_flight)
    driver.commit(write)
    driver.check()
    assert [(job.outcome, job.ready) for job in jobs] == [(Outcome.COMPLETE, 4), (Outcome.COMPLETE, 8)]
    assert [job.count_pages() for job in jobs] == [(0, 0), (0, 0)]
    assert [driver.shown(job) for job in jobs] == [[KEYS[:4]], [KEYS]]
    assert write.committed == 8
    assert all(load.read is not None and load.read.stopped for load in reads)
    assert driver.pool.slots[0].filling == begun
    for load in reads:
        if end == "stalled":
            driver.stall_read(load)
            driver.check()
        driver.end_read_as(load, Reason.CORRUPT if end == "failed" else None, untouched=end == "untouched")
        driver.check()
    assert driver.pool.slots[0].free == 24
    driver.run()
    assert len(driver.reads) == begun  # nothing is read any more
    driver.store_all()


def test_a_job_that_waits_for_more_than_was_written_goes_on() -> None:
    driver = _driver(32)
    write = driver.begin_write(KEYS[:4], asked=False)
    driver.store(KEYS)
    job = driver.submit(KEYS)
    driver.answer_probes()
    driver.begin_reads()
    driver.commit(write)
    assert (job.done, job.ready) == (False, 4)
    driver.run()
    assert (job.outcome, job.count_pages()) == (Outcome.COMPLETE, (4, 0))
    assert [key for _, key in driver.reads] == [KEYS[0], *KEYS[4:]]
    driver.check()


def test_a_prefetch_gets_pages_on_their_way_to_l3_from_the_pool() -> None:
    driver = _driver()
    driver.write(KEYS)
    job = driver.prefetch(KEYS)
    assert (job.host, job.ready, driver.reads) == (8, 8, [])
    driver.release(job)
    driver.store_all()
    assert driver.pool.index[0].held == 0


def test_dirty_pages_are_not_evicted_and_clean_ones_go_deepest_first() -> None:
    driver = _driver(8)
    driver.write(KEYS[:4])
    driver.store(OTHER)
    refused = driver.prefetch(OTHER)
    assert (refused.ready, refused.shortfall) == (4, {Reason.HOST_CAPACITY: 4})
    driver.release(refused)
    driver.store_all()
    driver.release(driver.prefetch(OTHER[:6]))
    assert driver.resident() == {*KEYS[:2], *OTHER[:6]}


def test_a_written_page_behind_a_cut_is_kept() -> None:
    """What a job brought itself behind its cut is dropped; what an engine wrote is not the job's to drop."""
    driver = _driver(32)
    write = driver.begin_write(KEYS[2:6], asked=False)
    driver.store(KEYS)
    job = driver.submit(KEYS)
    driver.answer_probes()
    driver.begin_all_reads()
    driver.end_read(driver.flight(KEYS[0]))
    driver.end_read(driver.flight(KEYS[7]))
    driver.commit(write)
    driver.store_all()
    driver.end_read_as(driver.flight(KEYS[1]), Reason.CORRUPT)
    assert (job.ready, job.shortfall) == (1, {Reason.CORRUPT: 7})
    assert driver.resident() == {KEYS[0], *KEYS[2:6]}


def test_a_part_of_the_pool_is_kept_for_writes() -> None:
    driver = _driver(16, reserve=0.25)
    driver.store(KEYS)
    driver.store(OTHER)
    first = driver.prefetch([*KEYS, *OTHER])
    assert (first.granted, first.shortfall) == (12, {Reason.HOST_CAPACITY: 4})
    new = chain("n", 8)
    write = driver.begin_write(new)
    assert (write.granted, write.reason) == (4, WriteReason.HOST_CAPACITY)
    driver.release(first)
    # What writes use counts as their part.
    assert driver.prefetch(KEYS).ready == 8
    assert driver.prefetch(OTHER).ready == 4
    driver.check()


def test_the_part_for_writes_leaves_a_slot_for_prefetches() -> None:
    driver = _driver(2, reserve=0.99)
    driver.store(KEYS)
    assert driver.prefetch(KEYS).ready == 1


# ---- attempts


def test_a_page_that_l3_does_not_take_is_tried_again_later_each_time() -> None:
    driver = _driver(retry_s=1.0, retry_growth=3.0, max_attempts=4)
    write = driver.write(KEYS[:1])
    for wait_s in (1.0, 3.0, 9.0):
        assert driver.store_next(failing=True)
        assert not driver.store_next()
        driver.advance(wait_s - 0.01)
        assert not driver.store_next()
        driver.advance(0.02)
    assert (write.settled, driver.pool.index[0].evictable) == (False, 0)
    driver.store_next()
    assert (write.durable, write.failed) == (1, 0)


def test_a_page_is_lost_after_so_many_attempts_and_can_be_evicted_then() -> None:
    driver = _driver(windows=(1,), max_attempts=3)
    write = driver.write(KEYS[:2], {1: [1]})
    driver.store_next()
    for _ in range(3):
        assert driver.store_next(failing=True)  # page 1 of the kv
        driver.store_next()  # its state, once
        driver.advance(10.0)
    assert (write.committed, write.durable, write.failed, write.settled) == (2, 1, 1, True)
    assert driver.resident() == set(KEYS[:2])
    assert driver.pool.index[0].evictable == 2
    assert _results(driver) == {"durable": 1, "lost": 1}


def test_the_last_page_of_a_write_frees_all_of_them() -> None:
    driver = _driver()
    driver.write(KEYS[:3])
    assert driver.store_next(failing=True)
    driver.store_all()
    assert driver.pool.index[0].evictable == 0  # the first is due later, and leads to the others
    driver.advance(1.0)
    driver.store_all()
    assert driver.pool.index[0].evictable == 3


def test_nothing_is_given_up_while_the_service_stops_and_all_is_due_at_once() -> None:
    driver = _driver(max_attempts=2)
    write = driver.write(KEYS[:3])
    for _ in range(3):
        driver.store_next(failing=True)
    assert driver.engine.writes.backlog == 0
    driver.engine.stop_all(driver.now)
    assert driver.engine.writes.backlog == 3
    for _ in range(3):
        driver.store_next(failing=True)
    assert driver.engine.writes.backlog == 0
    assert (write.failed, driver.pool.dirty(0)) == (0, 3)
    driver.check()


# ---- what an earlier life left


def test_dirty_pages_of_an_earlier_life_go_on_to_l3() -> None:
    driver = _driver(8)
    log = driver.logs[0]
    for slot, key in ((5, KEYS[1]), (2, KEYS[0]), (1, OTHER[0])):
        log.visible[slot] = key
    log.dirty = {2, 5}
    driver.pool.adopt(0, [(5, KEYS[1]), (2, KEYS[0]), (1, OTHER[0])])
    driver.engine.writes.adopt(driver.pool, [[(1, 5, KEYS[1]), (0, 2, KEYS[0])]], driver.now)
    driver.check()
    assert driver.pool.index[0].evictable == 1
    driver.store_next()
    assert driver.stored == {(0, KEYS[0])}
    driver.store_all()
    assert driver.stored == {(0, KEYS[0]), (0, KEYS[1])}
    assert driver.pool.index[0].evictable == 3
    assert driver.engine.writes.results[WriteResult.DURABLE] == 2
    driver.check_idle()


def test_slots_lent_in_an_earlier_life_stay_out_of_use_for_as_long_as_an_engine_may_write() -> None:
    driver = _driver(8, expire_s=30.0, margin_s=5.0)
    for slot in (1, 4):
        driver.logs[0].begin_fill(slot, lent=True)
    driver.engine.writes.quarantine(driver.pool, [[1, 4]], driver.now)
    driver.check()
    driver.store(KEYS)
    assert driver.prefetch(KEYS).granted == 6
    driver.advance(34.9)
    assert driver.pool.slots[0].filling == 2
    driver.advance(0.1)
    assert driver.pool.slots[0].filling == 0
    assert driver.logs[0].lent == set()
    driver.advance(100.0)
    driver.check_idle()


def _share(part: int, parts: int = 2) -> Share:
    return Share("r", part, parts)


def test_a_write_of_two_parts_is_published_with_the_last_of_them() -> None:
    driver = _driver(windows=(1,))
    write = driver.begin_write(KEYS, {1: [7]}, share=_share(1))
    assert driver.begin_write(KEYS, {1: [7]}, share=_share(0)) is write
    driver.check()
    assert len(driver.logs[0].lent) == 8
    driver.commit(write, 0)
    driver.commit(write, 0)
    driver.check()
    assert (write.parts_left, driver.resident()) == (1, set())
    driver.commit(write, 1)
    driver.check()
    assert (write.committed, write.parts_left) == (8, 0)
    assert driver.resident() == set(KEYS)
    driver.store_all()
    assert driver.commit(write, 1) is write
    assert _results(driver) == {"durable": 8}
    # The name is free again, and the pages are there.
    assert driver.begin_write(OTHER, share=_share(0)) is not write
    driver.check()


def test_a_part_belongs_to_who_asked_first_and_to_the_same_pages() -> None:
    driver = _driver(32, windows=(1,))
    write = driver.begin_write(KEYS, {1: [7]}, share=_share(0))
    with pytest.raises(ConflictError, match="part 0 of this write is being filled") as caught:
        driver.begin_write(KEYS, {1: [7]}, share=_share(0))
    assert caught.value.slug == "part-taken"
    for keys, tails, share in (
        (KEYS[:7], {}, _share(1)),
        (KEYS, {1: [6]}, _share(1)),
        (KEYS, {1: [7]}, _share(1, parts=3)),
    ):
        with pytest.raises(ConflictError, match="of other pages"):
            driver.begin_write(keys, tails, share=share)
    with pytest.raises(NotFoundError):
        driver.commit(write, 1)  # nobody was given this part
    driver.check()


def test_dropping_one_part_ends_the_write_and_keeps_its_slots_from_others_meanwhile() -> None:
    driver = _driver(expire_s=30.0, margin_s=5.0)
    write = driver.begin_write(KEYS, share=_share(0))
    driver.begin_write(KEYS, share=_share(1))
    driver.engine.writes.drop(write.id_of(0), driver.now)
    driver.check()
    with pytest.raises(NotFoundError):
        driver.commit(write, 1)
    assert len(driver.logs[0].lent) == 8
    driver.advance(34.0)
    assert len(driver.logs[0].lent) == 8
    other = driver.begin_write(KEYS, share=_share(1))
    assert other is not write
    driver.engine.writes.drop(other.id_of(1), driver.now)  # nobody else fills it: at once
    assert len(driver.logs[0].lent) == 8
    driver.advance(1.0)
    assert driver.logs[0].lent == set()
    assert _results(driver) == {"dropped": 16}
    driver.check_idle()


def test_a_part_that_never_comes_lets_the_write_expire() -> None:
    driver = _driver(expire_s=30.0, margin_s=5.0)
    write = driver.begin_write(KEYS, share=_share(0))
    driver.commit(write, 0)
    driver.advance(30.0)
    with pytest.raises(GoneError):
        driver.commit(write, 0)
    late = driver.begin_write(KEYS, share=_share(1))
    assert late is not write
    driver.engine.writes.drop(late.id_of(1), driver.now)
    driver.advance(5.0)
    assert driver.logs[0].lent == set()
    assert _results(driver) == {"expired": 8, "dropped": 8}


def test_what_gets_no_slot_has_no_parts() -> None:
    driver = _driver(8)
    driver.write(KEYS)
    refused = driver.begin_write(OTHER, share=_share(0))
    assert (refused.granted, refused.parts_left) == (0, 0)
    driver.store_all()
    assert driver.begin_write(OTHER, share=_share(0)).granted == 8
    stored = driver.begin_write(OTHER, share=_share(1))
    assert (stored.granted, stored.parts_left) == (8, 2)
    driver.check()
