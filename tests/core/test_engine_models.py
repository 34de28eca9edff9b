"""One engine with several models, and pools that begin with pages."""

from forestage.core.audit import check_integrity
from forestage.core.engine import Engine, EngineSettings
from forestage.core.job import Job, Outcome, PrefetchRequest
from forestage.core.model_pool import ModelPool
from support.engine_driver import SlotLog, chain, kv_model

KEYS = chain("a", 6)


def _engine(budget_bytes: int = 1 << 40) -> Engine:
    layouts = [kv_model(name="one"), kv_model(windows=[1], name="two")]
    pools = {}
    for layout in layouts:
        capacities = [8] * len(layout.components)
        pools[layout.name] = ModelPool(layout, capacities, [SlotLog(capacity) for capacity in capacities])
    return Engine(pools, EngineSettings(budget_bytes))


def _submit(engine: Engine, model: str, keys: list[bytes] = KEYS) -> Job:
    return engine.submit(PrefetchRequest(f"{model}-{len(engine.jobs)}", model, tuple(keys)), 0.0)


def _serve(engine: Engine) -> list[set[str]]:
    """Say that L3 has everything and read it; return of which models each batch was."""
    models = []
    while engine.probes:
        job = engine.probes.popleft()
        engine.probe_answered(job, [bytearray([1] * len(job.keys)) for _ in job.layout.components], 0.0)
    while (batch := engine.next_batch(1000)) is not None:
        layout, loads = batch
        models.append({layout.name})
        for load in loads:
            assert load in engine.pools[layout.name].loads[load.component].values()
            engine.read_ended(layout.name, load, None, 0.0)
        check_integrity(engine)
    return models


def test_models_share_no_pages_and_no_batches() -> None:
    engine = _engine()
    jobs = [_submit(engine, "one"), _submit(engine, "two"), _submit(engine, "one"), _submit(engine, "two")]
    batches = _serve(engine)
    assert {"one"} in batches
    assert {"two"} in batches
    assert [job.outcome for job in jobs] == [Outcome.COMPLETE] * 4
    assert [job.count_pages() for job in jobs] == [(6, 0), (6, 0), (0, 6), (0, 6)]
    assert [len(job.lease.slots) for job in jobs if job.lease is not None] == [1, 2, 1, 2]
    for job in jobs:
        engine.forget(job.request.request_id, 0.0)
    assert len(engine.leases) == 0
    check_integrity(engine)


def test_models_share_one_budget() -> None:
    engine = _engine(budget_bytes=6 * 256)
    first, second = _submit(engine, "one"), _submit(engine, "two")
    assert (first.state.value, second.state.value) == ("probing", "queued")
    _serve(engine)
    assert (first.done, second.state.value) == (True, "probing")


def test_a_pool_can_begin_with_pages() -> None:
    """They were there when the service started: nobody reads them again, and the oldest go first."""
    log = SlotLog(8)
    pool = ModelPool(kv_model(), [8], [log])
    old = chain("old", 2)
    pages = [(7, old[1]), (5, old[0]), (2, KEYS[2]), (4, KEYS[1]), (1, KEYS[0])]
    for slot, key in pages:
        log.visible[slot] = key
    pool.adopt(0, pages)
    engine = Engine({"m": pool}, EngineSettings(1 << 40))
    check_integrity(engine)
    job = _submit(engine, "m")
    assert job.host == 3
    _serve(engine)
    assert (job.outcome, job.count_pages()) == (Outcome.COMPLETE, (3, 0))
    assert pool.index[0].evicted == 0
    more = _submit(engine, "m", chain("b", 1))
    _serve(engine)
    assert more.outcome is Outcome.COMPLETE
    assert (old[0] in log.visible, old[1] in log.visible) == (True, False)
    assert (pool.index[0].used, pool.index[0].unused) == (0, 0)
