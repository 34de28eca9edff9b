"""Two tenants on one engine: one asks for the same prefixes again and again, the other for ever new ones."""

import random
from dataclasses import dataclass

from forestage.core.engine import EngineSettings
from forestage.core.job import Job
from forestage.core.tenants import TenantShare
from support.engine_driver import EngineDriver, chain, kv_model

__all__ = ["Flood", "hit_rate"]

_PREFIX_PAGES = 25
_FLOOD_PAGES = 40


@dataclass(frozen=True, slots=True)
class Flood:
    """What the second tenant does between two requests of the first: `jobs` of 40 new pages each.

    With `keeps_leases` it never releases one, and they live longer than the run.
    """

    jobs: int
    keeps_leases: bool = False


def hit_rate(
    pool_pages: int, prefixes: int, flood: Flood, min_share: float, *, requests: int = 400, seed: int = 0
) -> float:
    """Return which part of the pages that the quiet tenant asked for was in the pool when it asked.

    It asks for `prefixes` prefixes of 25 pages, the first ones more often. `min_share` 0: no tenants are configured.
    """
    rng = random.Random(seed)
    shares = (TenantShare("quiet", min_share), TenantShare("flooding")) if min_share else ()
    driver = EngineDriver(kv_model(), [pool_pages], EngineSettings(1 << 40, tenants=shares))
    wanted = [chain(f"q{number:03}", _PREFIX_PAGES) for number in range(prefixes)]
    for keys in wanted:
        driver.store(keys)
    host = asked = begun = 0
    for _ in range(requests):
        for _ in range(flood.jobs):
            keys = chain(f"f{begun:06}", _FLOOD_PAGES)
            begun += 1
            driver.store(keys)
            job = _prefetch(driver, keys, "flooding")
            if job.lease is not None and not flood.keeps_leases:
                driver.release(job)
        keys = wanted[min(int(rng.expovariate(4 / prefixes)), prefixes - 1)]
        job = _prefetch(driver, keys, "quiet")
        host += job.host
        asked += job.requested
        if job.lease is not None:
            driver.release(job)
        driver.advance(0.001)
    driver.check()
    return host / asked


def _prefetch(driver: EngineDriver, keys: list[bytes], tenant: str) -> Job:
    """Prefetch to the end, without a check of everything after each step."""
    job = driver.submit(keys, tenant=tenant, lease_ms=600_000)
    driver.answer_probes()
    while driver.begin_reads(1 << 30):
        for load in tuple(driver.in_flight):
            driver.end_read(load)
    return job
