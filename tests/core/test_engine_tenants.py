"""Tenants of one pool: what is promised to one whatever the other does, and what none may exceed."""

import pytest

from forestage.core.engine import EngineSettings
from forestage.core.errors import CapacityError
from forestage.core.job import Lengths, Outcome, Reason
from forestage.core.shared_index import SharedIndex
from forestage.core.tenants import TenantShare
from forestage.core.write import WriteReason
from support.engine_driver import EngineDriver, chain, kv_model
from support.tenant_flood import Flood, hit_rate

KV = kv_model()
PAGE = KV.components[0].slot_bytes


def _driver(slots: int, *shares: TenantShare, budget: int = 1 << 40, queue_limit: int = 1024) -> EngineDriver:
    driver = EngineDriver(KV, [slots], EngineSettings(budget, queue_limit, tenants=shares))
    for name in "abcd":
        driver.store(chain(name, 100))
    return driver


def _charged(driver: EngineDriver) -> list[int]:
    index = driver.pool.index[0]
    assert isinstance(index, SharedIndex)
    return index.charged


@pytest.mark.parametrize("keeps_leases", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_hit_rate_under_a_flood_is_that_of_a_pool_of_its_own(keeps_leases: bool, seed: int) -> None:
    """The promise of `min_share`, in figures: see benchmarks/tenants.py."""
    flood = Flood(8, keeps_leases)
    alone = hit_rate(150, 10, Flood(0), 0, requests=80, seed=seed)
    unprotected = hit_rate(500, 10, flood, 0, requests=80, seed=seed)
    protected = hit_rate(500, 10, flood, 0.3, requests=80, seed=seed)
    assert alone > 0.5
    # Pages that come back outlive a flood of new ones by themselves, but not one that holds what it brings.
    assert unprotected < (alone / 2 if keeps_leases else protected)
    assert protected >= alone


def test_idle_room_is_borrowed_and_given_back_before_its_owner_misses_it() -> None:
    driver = _driver(100, TenantShare("a", 0.4), TenantShare("b", 0.2))
    driver.release(driver.prefetch(chain("b", 60), tenant="b"))
    driver.release(driver.prefetch(chain("c", 40), tenant="b"))
    assert _charged(driver) == [0, 0, 100, 0, 0]
    job = driver.prefetch(chain("a", 40), tenant="a")
    assert job.outcome is Outcome.COMPLETE
    assert _charged(driver) == [0, 40, 60, 0, 0]
    driver.release(job)
    driver.release(driver.prefetch(chain("d", 60), tenant="b"))
    assert driver.resident() >= set(chain("a", 40))


def test_what_is_borrowed_cannot_be_leased_away_from_its_owner() -> None:
    driver = _driver(100, TenantShare("a", 0.4), TenantShare("b", 0.2))
    job = driver.prefetch(chain("b", 100), tenant="b")
    assert (job.ready, job.shortfall) == (60, {Reason.HOST_CAPACITY: 40})
    assert driver.prefetch(chain("a", 50), tenant="a").lengths() == Lengths(50, 0, 50, 50, 40, 40)


def test_what_may_be_pinned_at_all_is_shared_likewise() -> None:
    shares = (TenantShare("a", 0.4), TenantShare("b", 0.2))
    driver = EngineDriver(KV, [100], EngineSettings(1 << 40, tenants=shares), pinned_fraction=0.5)
    for name in "ab":
        driver.store(chain(name, 100))
    assert driver.prefetch(chain("b", 100), tenant="b").ready == 50 - 20
    assert driver.prefetch(chain("a", 100), tenant="a").ready == 20
    driver.check()


def test_a_tenant_never_exceeds_its_maximum_and_loses_its_own_oldest_pages() -> None:
    driver = _driver(100, TenantShare("a", 0, 0.25))
    assert driver.prefetch(chain("a", 40), tenant="a").lengths() == Lengths(40, 0, 40, 40, 25, 25)
    assert driver.prefetch(chain("c", 40), tenant="a").ready == 0  # all of it is leased
    driver.advance(1000.0)
    driver.release(driver.prefetch(chain("c", 10), tenant="a"))
    assert _charged(driver)[1] == 25
    assert driver.pool.slots[0].free == 75  # although there is room
    assert driver.resident() == {*chain("a", 15), *chain("c", 10)}


def test_unknown_tenants_share_default() -> None:
    driver = _driver(100, TenantShare("default", 0.1, 0.2), TenantShare("a", 0.5))
    for number, tenant in enumerate(["default", "x", "y"]):
        job = driver.prefetch(chain("bcd"[number], 15), tenant=tenant)
        assert job.ready == (15 if number == 0 else 20 - 15 if number == 1 else 0)


def test_another_tenants_page_under_an_equal_key_is_a_hit() -> None:
    driver = _driver(100, TenantShare("a", 0.5), TenantShare("b", 0.5))
    driver.release(driver.prefetch(chain("a", 20), tenant="a"))
    driver.reads.clear()
    job = driver.prefetch(chain("a", 20), tenant="b")
    assert (job.host, job.ready, driver.reads) == (20, 20, [])
    assert _charged(driver) == [0, 20, 0, 0, 0]  # a is not above its minimum, so it keeps them
    assert driver.engine.measure("m", chain("a", 20), 0, None, "b").host == 20


def test_lookup_and_lease_know_the_room_of_a_tenant() -> None:
    driver = _driver(100, TenantShare("a", 0.7), TenantShare("b", 0, 0.2))
    masks = [bytearray(b"\1" * 100)]
    granted = [driver.engine.measure("m", chain("a", 100), 0, masks, tenant).granted for tenant in ("a", "b", "x")]
    assert granted == [100, 20, 30]
    driver.release(driver.prefetch(chain("a", 80), tenant="a"))
    lengths, lease = driver.engine.take_lease("m", chain("a", 100), 0, 1.0, driver.now, "b")
    assert (lengths.host, lengths.ready) == (80, 20)
    assert lease is not None
    driver.check()


def test_a_settling_job_keeps_its_tail_states_at_its_maximum() -> None:
    """Cut short, a hybrid job falls back on the state it holds, although its tenant has no room for another one."""
    layout = kv_model(windows=[1])
    shares = (TenantShare("a", 0, 0.1),)
    driver = EngineDriver(layout, [100, 10], EngineSettings(1 << 40, tenants=shares))
    keys = chain("a", 10)
    driver.store(keys, [(1, [4, 8])])
    driver.release(driver.prefetch(keys[:4], tenant="a"))
    job = driver.submit(keys, tenant="a")
    driver.answer_probes()
    driver.begin_all_reads()
    driver.engine.stop(job, Reason.FINISHED, driver.now)
    driver.run()
    driver.check()
    assert job.ready == 4


def test_the_queue_gives_turns_to_tenants() -> None:
    driver = _driver(400, TenantShare("a"), TenantShare("b"), budget=10 * PAGE)
    started: list[str] = []
    jobs = {}
    for number in range(6):
        jobs[driver.submit(chain(f"x{number}", 10), tenant="a")] = f"a{number}"
    for number in range(3):
        jobs[driver.submit(chain(f"y{number}", 10), tenant="b")] = f"b{number}"
    while driver.engine.live:
        (running,) = (job for job in driver.engine.live if job.timing.started is not None)
        started.append(jobs[running])
        driver.engine.stop(running, Reason.CANCELLED, driver.now)
    # a0 started at once; a1 waited first; from then on they take turns
    assert started == ["a0", "a1", "b0", "a2", "b1", "a3", "b2", "a4", "a5"]


def test_turns_are_by_bytes_and_priority_comes_first() -> None:
    driver = _driver(400, TenantShare("a"), TenantShare("b"), budget=40 * PAGE)
    first = driver.submit(chain("z", 40), tenant="a")
    jobs = {}
    for number in range(2):
        jobs[driver.submit(chain(f"x{number}", 40), tenant="a")] = f"a{number}"
    for number in range(5):
        jobs[driver.submit(chain(f"y{number}", 20), tenant="b")] = f"b{number}"
    jobs[driver.submit(chain("u", 40), tenant="a", priority=1)] = "urgent"
    driver.engine.stop(first, Reason.CANCELLED, driver.now)
    started: list[str] = []
    while driver.engine.live:
        running = [job for job in driver.engine.live if job.timing.started is not None]
        running.sort(key=lambda job: jobs[job])
        started += [jobs[job] for job in running]
        for job in running:
            driver.engine.stop(job, Reason.CANCELLED, driver.now)
    assert started == ["urgent", "a0", "b0", "b1", "a1", "b2", "b3", "b4"]


def test_a_full_queue_keeps_the_places_that_are_promised() -> None:
    driver = _driver(400, TenantShare("a", 0.5), TenantShare("b", 0.25), budget=PAGE, queue_limit=8)
    driver.submit(chain("first", 10), tenant="b")
    for number in range(4):  # 2 promised to b, and 2 that are promised to nobody
        driver.submit(chain(f"x{number}", 10), tenant="b")
    with pytest.raises(CapacityError):
        driver.submit(chain("x9", 10), tenant="b")
    with pytest.raises(CapacityError):
        driver.submit(chain("x9", 10), tenant="who")
    for number in range(4):
        driver.submit(chain(f"y{number}", 10), tenant="a")
    with pytest.raises(CapacityError):
        driver.submit(chain("y9", 10), tenant="a")
    driver.check()


def test_readers_are_shared_between_tenants_not_between_jobs() -> None:
    driver = _driver(400, TenantShare("a"), TenantShare("b"))
    for number in range(8):
        driver.store(chain(f"x{number}", 30))
        driver.submit(chain(f"x{number}", 30), tenant="a")
    driver.store(chain("y", 30))
    driver.submit(chain("y", 30), tenant="b")
    driver.answer_probes()
    for _ in range(20):
        driver.begin_reads()
    read = [key[:1] for _, key in driver.reads]
    assert (read.count(b"x"), read.count(b"y")) == (10, 10)
    driver.run()


def test_slots_lent_to_a_writer_are_on_its_account() -> None:
    driver = _driver(100, TenantShare("a", 0.4), TenantShare("b", 0.2, 0.3))
    assert driver.begin_write(chain("w", 50), tenant="a").granted == 50
    write = driver.begin_write(chain("v", 50), tenant="b")
    assert (write.granted, _charged(driver)) == (0, [0, 50, 0, 0, 0])  # half of the slots may be dirty, and are
    driver = _driver(100, TenantShare("a", 0.4), TenantShare("b", 0.2, 0.3))
    write = driver.begin_write(chain("v", 50), tenant="b")
    assert (write.granted, write.reason, _charged(driver)) == (30, WriteReason.HOST_CAPACITY, [0, 0, 30, 0, 0])
    driver.commit(write)
    assert driver.prefetch(chain("v", 30), tenant="a").host == 30
    driver.check()


def test_what_a_restart_finds_is_nobodys_until_it_is_used() -> None:
    driver = _driver(100, TenantShare("a", 0.4), TenantShare("b", 0.2))
    driver.release(driver.prefetch(chain("a", 40), tenant="a"))
    write = driver.write(chain("w", 40))
    driver.restart()
    driver.check()
    assert write.granted == 40
    assert _charged(driver) == [0, 0, 0, 80, 0]
    assert driver.prefetch(chain("b", 60), tenant="b").ready == 20  # what waits for L3 is held, and a has its minimum
    driver.release(driver.prefetch(chain("a", 40), tenant="a"))
    assert _charged(driver) == [0, 40, 20, 40, 0]
    driver.check()
