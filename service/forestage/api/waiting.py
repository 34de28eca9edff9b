"""Waiting for a job or a write on behalf of a client who may leave."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from forestage.core.job import Job
from forestage.core.write import Write
from forestage.prefetch.service import PrefetchService

__all__ = ["client_left", "wait_for_job", "wait_for_jobs", "wait_for_write"]


async def client_left(receive: Callable[[], Awaitable[Any]]) -> None:
    """Return when the client has left. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def wait_for_job(service: PrefetchService, job: Job, wait_ms: int, receive: Callable[[], Awaitable[Any]]) -> bool:
    """Wait up to `wait_ms` milliseconds for a job; False if the client left before it was done.

    The body must have been read, so that the next message of `receive` can only be the disconnect.
    """
    return job.done or not wait_ms or await _wait(service.wait(job), wait_ms, receive)


async def wait_for_jobs(
    service: PrefetchService, jobs: Sequence[Job], wait_ms: int, receive: Callable[[], Awaitable[Any]]
) -> None:
    """Wait up to `wait_ms` milliseconds for all of some jobs, or for their client to leave."""
    if wait_ms and not all(job.done for job in jobs):
        await _wait(_all_done(service, jobs), wait_ms, receive)


async def _all_done(service: PrefetchService, jobs: Sequence[Job]) -> None:
    for job in jobs:
        await service.wait(job)


async def wait_for_write(
    service: PrefetchService, write: Write, wait_ms: int, receive: Callable[[], Awaitable[Any]]
) -> None:
    """Wait up to `wait_ms` milliseconds for a write to be settled, or for its client to leave."""
    if not write.settled and wait_ms:
        await _wait(service.wait_for_write(write), wait_ms, receive)


async def _wait(event: Coroutine[Any, Any, None], wait_ms: int, receive: Callable[[], Awaitable[Any]]) -> bool:
    done = asyncio.create_task(event)
    left = asyncio.create_task(client_left(receive))
    try:
        await asyncio.wait({done, left}, timeout=wait_ms / 1e3, return_when=asyncio.FIRST_COMPLETED)
        return done.done() or not left.done()
    finally:
        done.cancel()
        left.cancel()
        await asyncio.gather(done, left, return_exceptions=True)
