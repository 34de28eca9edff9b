"""Recount everything the engine holds: what tests call at teardown, and an idle service now and then."""

from collections import Counter

from forestage.core.engine import Engine
from forestage.core.holdings import owned_bytes
from forestage.core.job import JobState

__all__ = ["check_integrity"]


def check_integrity(engine: Engine) -> None:
    """Raise RuntimeError with the numbers if any law of the engine or its parts is broken. O(capacity)."""
    for name, pool in engine.pools.items():
        pool.check_integrity()
        for c, index in enumerate(pool.index):
            held = Counter[int]()
            for job in engine.live:
                if job.layout.name == name:
                    held.update(job.holds[c].values())
            for lease in (*engine.leases, *engine.pins):
                if lease.model == name:
                    held.update(lease.slots[c])
            for write in engine.writes:
                if write.layout.name == name and write.held:
                    held.update(write.held[c].values())
            index.check_holds(held)
    engine.writes.check_integrity()
    engine.expectations.check_integrity()
    waiting = sum(job.want is not None for job in engine.live)
    wants = sum(len(pool.wants) for pool in engine.pools.values())
    if wants != waiting + len(engine.expectations) or waiting != engine.admission.waiting:
        raise RuntimeError(f"{wants} wants, of {waiting} queued jobs and {len(engine.expectations)} expectations")
    engine.admission.check_integrity()
    if engine.admission.running + engine.admission.waiting != len(engine.live):
        raise RuntimeError(f"{len(engine.live)} live jobs, admission knows {engine.admission.running} running ones")
    live_pages = sum(job.requested for job in engine.live)
    if engine.live_pages != live_pages:
        raise RuntimeError(f"{engine.live_pages} pages of live jobs, recounted {live_pages}")
    if len(engine.jobs) - len(engine.live) != engine.num_remembered:
        raise RuntimeError(f"{len(engine.jobs)} jobs, {len(engine.live)} live, {engine.num_remembered} remembered")
    for job in engine.live:
        job.check_integrity()
        loads = [load for pending in job.pending for load in pending.values()]
        if job.state is JobState.LOADING and not loads and not job.draining:
            raise RuntimeError(f"a job waits for nothing: {job.lengths()}")
        if any(job not in load.subscribers for load in loads):
            raise RuntimeError("a job waits for a load that does not know it")
        if engine.admission.promised_to(job) < owned_bytes(job):
            raise RuntimeError(f"promised {engine.admission.promised_to(job)} bytes, waits for {owned_bytes(job)}")
        if any(job not in load.drained_for or not load.filling for load in job.draining):
            raise RuntimeError("a job waits for the slot of a read that has ended")
