"""What a job has of the pool: holds on resident pages, and loads that it waits for.

Law: `job.holds[c][page]` is one hold on the slot of `keys[page]`; `job.pending[c][page]` is a load that the job
subscribes to; no page is in both. A load has one owner among its subscribers, whose budget carries its slot.
"""

from collections.abc import Callable, Iterable, Sequence

from forestage.core.job import Job
from forestage.core.loads import Load
from forestage.core.model_pool import ModelPool

__all__ = [
    "drop_behind",
    "hold",
    "hold_slots",
    "holds_window",
    "keep",
    "owned_bytes",
    "release",
    "taken",
    "unwant",
    "waiting_loads",
    "want",
    "within_reach",
]


def hold(pool: ModelPool, job: Job, c: int, pages: Iterable[int]) -> None:
    """Hold resident pages that the job does not hold yet."""
    held, keys = job.holds[c], job.keys
    wanted = [page for page in pages if page not in held]
    if wanted:
        hold_slots(pool, job, c, wanted, pool.index[c].slots_of([keys[page] for page in wanted]))


def hold_slots(pool: ModelPool, job: Job, c: int, pages: Sequence[int], slots: Sequence[int]) -> None:
    """Hold resident pages of which it is known where they are, and that the job does not hold."""
    index, arrived = pool.index[c], job.arrived_pages[c]
    # A page that this very job brought is neither "used" nor wanted again because the job looks at it again.
    found = slots
    if arrived:
        found = [slot for page, slot in zip(pages, slots, strict=True) if page not in arrived]
        index.hold([slot for page, slot in zip(pages, slots, strict=True) if page in arrived], job.tenant)
    index.mark_used(found)
    index.hold(found, job.tenant, again=True)
    job.holds[c].update(zip(pages, slots, strict=True))


def want(pool: ModelPool, job: Job, c: int, pages: Iterable[int]) -> None:
    """Wait for pages that are not resident: join the load that is there, or reserve a slot and begin one."""
    loads, keys, pending = pool.loads[c], job.keys, job.pending[c]
    pages = list(pages)
    missing = [page for page in pages if keys[page] not in loads]
    for page in pages if len(missing) < len(pages) else ():
        if keys[page] in loads:
            pool.subscribe(loads[keys[page]], job)
    pool.reserve(c, missing, job)
    for page in pages:
        pending[page] = loads[keys[page]]


def taken(job: Job, load: Load) -> int:
    """Take a load that has ended out of what a job waits for, and return which page of the job it was."""
    pending = job.pending[load.component]
    page = load.page
    if pending.get(page) is not load:
        # Whoever began it asked for the key at another place: its keys are no chain of prefixes.
        page = next(page for page, other in pending.items() if other is load)
    del pending[page]
    return page


def unwant(
    pool: ModelPool,
    job: Job,
    c: int,
    pages: Iterable[int],
    on_heir: Callable[[Job, int], None],
    *,
    stop: bool = True,
) -> None:
    """Stop waiting for pages. `on_heir(job, bytes)` is told who carries on with a read that this job owned.

    With `stop` false, reads that nobody wants any more go on until the caller stops them.
    """
    for page in pages:
        load = job.pending[c].pop(page)
        pool.unsubscribe(load, job, stop=stop)
        if load.owner is job and load.subscribers:
            load.owner = load.subscribers[0]
            on_heir(load.owner, job.layout.components[c].slot_bytes)


def release(pool: ModelPool, job: Job, c: int, pages: Iterable[int], *, drop_from: int) -> None:
    """Release holds, deepest page first.

    Pages from `drop_from` on that came from L3 while the job ran do not stay, unless somebody else holds them too:
    nothing behind a cut remains.
    """
    keep_resident: list[int] = []
    dropped: list[int] = []
    for page in sorted(pages, reverse=True):
        behind = page >= drop_from and page in job.arrived_pages[c]
        (dropped if behind else keep_resident).append(job.holds[c].pop(page))
        if behind:
            job.arrived_pages[c].remove(page)
    pool.index[c].release(keep_resident)
    pool.drop(c, dropped)


def drop_behind(pool: ModelPool, job: Job, c: int, cut: int) -> None:
    """Drop what came for this job behind its cut and was released before the cut came down there (tail states)."""
    pool.drop_unheld(c, [job.keys[page] for page in job.arrived_pages[c] if page >= cut])


def keep(job: Job, ranges: Sequence[range]) -> tuple[tuple[int, ...], ...]:
    """Take holds out of the job, for a lease that takes them over; `ranges[c]` are pages that it holds."""
    return tuple(tuple(map(job.holds[c].pop, pages)) for c, pages in enumerate(ranges))


def owned_bytes(job: Job) -> int:
    """Return the bytes of the slots whose loads a job waits for and owns."""
    return sum(
        component.slot_bytes * sum(load.owner is job for load in pending.values())
        for component, pending in zip(job.layout.components, job.pending, strict=True)
    )


def holds_window(job: Job, c: int) -> bool:
    """Say whether a job holds the tail states of a component for the length it aims at."""
    first = max(job.request.device_pages, job.aim - job.layout.components[c].window)
    return all(page in job.holds[c] for page in range(first, job.aim))


def within_reach(job: Job) -> int:
    """Return how far the pages go that a job holds or waits for, as a length; what it gave up is not had again."""
    page = job.contiguous
    while page < job.cut_at and all(page in job.holds[c] or page in job.pending[c] for c in job.layout.every_page):
        page += 1
    return page


def waiting_loads(job: Job, components: Iterable[int]) -> list[Load]:
    """Return the loads of some components that a job waits for and whose read has not begun, in prefix order."""
    lines = [[load for load in job.pending[c].values() if not load.filling] for c in components]
    lines = [line for line in lines if line]
    if len(lines) == 1:
        return lines[0]  # asked for in order
    waiting = [load for line in lines for load in line]
    waiting.sort(key=lambda load: (load.page, load.component))
    return waiting
