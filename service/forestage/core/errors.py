"""Errors typed by who must act. Each carries the HTTP status, a stable slug and, where waiting helps, a time.

A miss is not an error: L3 trouble shortens a prefix, it never raises to a caller.
"""

__all__ = [
    "BadRequestError",
    "CapacityError",
    "ConflictError",
    "ForbiddenError",
    "ForestageError",
    "GoneError",
    "NotFoundError",
    "StartError",
    "StoppingError",
    "StorageUnavailableError",
    "TooLargeError",
]


class ForestageError(Exception):
    """Base of all; never raised itself."""

    status = 500
    slug = "internal"

    def __init__(self, detail: str, *, slug: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.slug = slug or type(self).slug
        self.retry_after_s = retry_after_s


class BadRequestError(ForestageError):
    """The caller must change the request."""

    status = 422
    slug = "invalid-request"


class TooLargeError(ForestageError):
    """The caller must ask for less."""

    status = 413
    slug = "too-large"


class ForbiddenError(ForestageError):
    """The caller's token is of too low a role, or of one tenant while it asked in the name of another."""

    status = 403
    slug = "other-tenant"


class NotFoundError(ForestageError):
    """The caller named something that is not here."""

    status = 404
    slug = "not-found"


class ConflictError(ForestageError):
    """The caller used a request id twice for different requests."""

    status = 409
    slug = "request-id-conflict"


class GoneError(ForestageError):
    """The caller came after the lease had ended."""

    status = 410
    slug = "lease-gone"


class CapacityError(ForestageError):
    """The caller should come back later: the queue, or a number of things there may be, is at its limit."""

    status = 429
    slug = "queue-full"


class StoppingError(ForestageError):
    """The service is stopping: ask another one, or this one after its restart."""

    status = 503
    slug = "stopping"


class StorageUnavailableError(ForestageError):
    """L3 could not be asked (down, breaker open, timed out). Storages raise it; no caller ever sees it."""

    status = 503
    slug = "storage-unavailable"


class StartError(ForestageError):
    """The operator must change a setting or the machine; the service refuses to start."""

    slug = "start"
