"""Where a job aims: which pages it holds and waits for, at the start and after each cut.

Law: everything resident below the aim is held before the first slot is taken, so a job never evicts pages of its own;
the tail states of `ready`, that a job which said it has them can fall back on, are held as long as it runs.
"""

from collections.abc import Callable

from forestage.core.holdings import hold, holds_window, release, unwant, want, within_reach
from forestage.core.job import Job
from forestage.core.loads import Load
from forestage.core.model_pool import ModelPool
from forestage.core.prefix import PrefixMap

__all__ = ["aim", "aim_below_cut", "has_its_aim"]


def aim(pool: ModelPool, job: Job, prefix: PrefixMap, target: int) -> None:
    """Hold what is resident of the prefix up to `target`, and wait for the rest; there must be room for it."""
    ranges = prefix.ranges(target)
    for c in job.layout.tails:
        hold(pool, job, c, prefix.window(c, job.ready))
    for c, pages in enumerate(ranges):
        resident = prefix.resident_pages(c, pages)
        # Of what every page needs nothing is held from the target on.
        if c in job.layout.tails or len(resident) > len(job.holds[c]):
            hold(pool, job, c, resident)
    for c, pages in enumerate(ranges):
        pending = job.pending[c]
        want(pool, job, c, [page for page in prefix.missing_pages(c, pages) if page not in pending])


def aim_below_cut(pool: ModelPool, job: Job, on_heir: Callable[[Job, int], None]) -> None:
    """Wait for the tail states of the largest boundary below the cut that can still be reached.

    The job gives up its tail states first, but those of `ready`, so that the others find its own slots. Where a slot is
    missing because a read that was given up is still going on, the job aims lower for now; it should aim again when
    such a read, one of `job.draining`, has ended.
    """
    given_up: list[Load] = []
    for c in job.layout.tails:
        given_up += [load for load in job.pending[c].values() if load.filling]
        unwant(pool, job, c, list(job.pending[c]), on_heir, stop=False)
        kept = _window_of_ready(job, c)
        release(pool, job, c, [page for page in job.holds[c] if page not in kept], drop_from=job.cut_at)
    prefix = pool.survey(job.keys, job.request.device_pages, job.masks)
    best = prefix.largest_boundary(job.cut_at)
    target = _largest_that_fits(pool, job, prefix, best)
    job.draining.update(given_up)
    if target == best:
        job.draining.clear()
    needed = best if job.draining else target
    for c in job.layout.every_page:
        unwant(pool, job, c, [page for page in job.pending[c] if page >= needed], on_heir)
    aim(pool, job, prefix, target)
    job.aim = target
    if any(load.filling for c in job.layout.tails for load in job.pending[c].values()):
        # A read that was under way before the cut may hang: have the boundary below as well if there is room.
        prefix = pool.survey(job.keys, job.request.device_pages, job.masks)
        below = _largest_that_fits(pool, job, prefix, prefix.largest_boundary(target - 1))
        if below > job.ready:
            aim(pool, job, prefix, below)
    job.draining = {load for load in job.draining if job not in load.subscribers}
    for load in job.draining:
        if job not in load.drained_for:
            load.drained_for = (*load.drained_for, job)
    for load in given_up:
        pool.stop_unwanted(load)
    job.cut_at = min(job.cut_at, within_reach(job))


def _window_of_ready(job: Job, c: int) -> range:
    return range(max(job.request.device_pages, job.ready - job.layout.components[c].window), job.ready)


def _largest_that_fits(pool: ModelPool, job: Job, prefix: PrefixMap, boundary: int) -> int:
    while boundary > job.ready and not pool.fits(prefix, boundary, job.ready, job.tenant):
        boundary = prefix.largest_boundary(boundary - 1)
    return boundary


def has_its_aim(job: Job) -> bool:
    """Say whether a job that was cut short has all that it can still hope for."""
    return not job.draining and job.contiguous >= job.aim and all(holds_window(job, c) for c in job.layout.tails)
