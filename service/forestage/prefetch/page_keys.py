"""Page keys from token ids beside the event loop: short prompts at once, long ones on a thread.

Law: at most one prompt is worked on at a time, whoever waits for it; what nobody waits for any more is not begun.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from forestage.core.errors import StoppingError
from forestage_client.hashing import HashScheme, Prompt

__all__ = ["AT_ONCE_TOKENS", "PageKeys"]

#: Up to here hashing takes about a millisecond at most: not worth the way to a thread and back.
AT_ONCE_TOKENS = 2048


class PageKeys:
    """Derives page keys for callers on one event loop, until `close`.

    There is one thread, since the interpreter runs the work of one at a time anyway, and more would only keep the loop
    waiting longer.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forestage-hash")
        self._closed = False

    async def of(self, scheme: HashScheme, prompt: Prompt) -> tuple[bytes, ...]:
        """Return the keys of the whole pages of a prompt.

        Raises ValueError or TypeError for what the scheme cannot hash, StoppingError for a long prompt after `close`.
        """
        work = partial(_hash, scheme, prompt)
        if len(prompt.token_ids) <= AT_ONCE_TOKENS:
            return work()
        if self._closed:
            raise StoppingError("the service is stopping", retry_after_s=5.0)
        hashing = self._thread.submit(work)
        try:
            return await asyncio.wrap_future(hashing)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if hashing.cancelled() and not (task and task.cancelling()):  # by `close`, not by who waits
                raise StoppingError("the service is stopping", retry_after_s=5.0) from None
            raise

    def close(self) -> None:
        """Begin nothing more: who waits gets StoppingError, but for the one prompt that is being hashed. Idempotent."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)


def _hash(scheme: HashScheme, prompt: Prompt) -> tuple[bytes, ...]:
    _refuse_booleans(prompt.token_ids)
    return tuple(scheme.keys_of_prompt(prompt))


def _refuse_booleans(token_ids: Sequence[int]) -> None:
    # They pass for the integers 0 and 1, and from JSON they are always a mistake.
    if isinstance(token_ids, list):
        for at in range(0, len(token_ids), AT_ONCE_TOKENS):
            if bool in set(map(type, token_ids[at : at + AT_ONCE_TOKENS])):
                raise TypeError("a truth value is no token id")
