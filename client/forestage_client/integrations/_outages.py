"""The two ways in which a service cannot be used by an engine, and when one that failed is asked again.

Law: after a failure nothing is asked until its pause is over, so that a service that hangs costs one call's time now
and then, not each call's.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from forestage_client._errors import (
    DeadlineExceeded,
    ForestageError,
    NotFound,
    ServerFault,
    Stopping,
    Unauthorized,
    Unreachable,
)

__all__ = ["Away", "Mismatch", "Outages"]

_PAUSE_S = {
    Unreachable: 0.25,
    Stopping: 0.25,
    DeadlineExceeded: 1.0,
    ServerFault: 1.0,
    NotFound: 1.0,
    Unauthorized: 5.0,
}


class Away(Exception):  # noqa: N818 - a state, not a fault of the caller's
    """The service is not there or not usable for now: everything is a miss."""


class Mismatch(Exception):  # noqa: N818 - names what is wrong
    """The model of the service's configuration, or of its pool, is not the one that the engine has."""


class Outages:
    """What is known of one service. For several threads: it is one number."""

    def __init__(self) -> None:
        self._closed_until_s = 0.0

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Ask the service within the block, and note how that fails. Raises Away while a pause lasts."""
        if time.monotonic() < self._closed_until_s:
            raise Away("the service did not answer a moment ago")
        try:
            yield
        except ForestageError as error:
            pause_s = _PAUSE_S.get(type(error))
            if pause_s is not None:
                self._closed_until_s = time.monotonic() + pause_s
            raise
