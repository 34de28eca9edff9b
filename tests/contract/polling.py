"""Waiting for a state without sleeping for a time."""

import asyncio
from collections.abc import Callable

__all__ = ["until"]


async def until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    """Return as soon as `condition` holds; raises TimeoutError after `deadline_s` seconds."""
    async with asyncio.timeout(deadline_s):
        while True:
            if condition():
                return
            await asyncio.sleep(0.001)
