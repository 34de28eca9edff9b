"""Errors typed by who must act. Each carries the HTTP status, a stable slug and, where waiting helps, a time.

A miss is not an error: L3 trouble shortens a prefix and says so in `Prefetch.shortfall`.
"""

# ruff: noqa: N818 - users read `except forestage_client.QueueFull`; a suffix would say nothing more.

__all__ = [
    "BadRequest",
    "Conflict",
    "DeadlineExceeded",
    "ForestageError",
    "Gone",
    "NotFound",
    "QueueFull",
    "ServerFault",
    "Stopping",
    "TooLarge",
    "Unauthorized",
    "Unreachable",
    "error_for",
]


class ForestageError(Exception):
    """Base of all that this package raises; never raised itself.

    `status` is the HTTP status, None if the service did not answer or was not asked. `slug` names the case and is
    stable, `detail` is for people. `retry_after_s` (seconds) is None when the service named no time.
    """

    default_status: int | None = None
    default_slug = "error"

    def __init__(
        self, detail: str, *, status: int | None = None, slug: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.status = type(self).default_status if status is None else status
        self.slug = slug or type(self).default_slug
        self.retry_after_s = retry_after_s


class BadRequest(ForestageError):
    """The caller must change the request."""

    default_status = 422
    default_slug = "invalid-request"


class Unauthorized(ForestageError):
    """The caller must give the right token."""

    default_status = 401
    default_slug = "unauthorized"


class NotFound(ForestageError):
    """The caller named a model, a job or a route that the service does not have (any more)."""

    default_status = 404
    default_slug = "not-found"


class Conflict(ForestageError):
    """The caller used a request id twice for different requests."""

    default_status = 409
    default_slug = "request-id-conflict"


class Gone(ForestageError):
    """The caller came after the lease or the write had ended: its slots must not be used any more."""

    default_status = 410
    default_slug = "lease-gone"


class TooLarge(ForestageError):
    """The caller must ask for less."""

    default_status = 413
    default_slug = "too-large"


class QueueFull(ForestageError):
    """The caller should come back after `retry_after_s`, or do without the prefetch."""

    default_status = 429
    default_slug = "queue-full"


class Stopping(ForestageError):
    """The service is stopping: ask another one, or this one after its restart."""

    default_status = 503
    default_slug = "stopping"


class ServerFault(ForestageError):
    """The operator must look: the service failed, or what answered does not speak this protocol."""

    default_status = 500
    default_slug = "internal"


class Unreachable(ForestageError):
    """The operator must look: no connection, or one that broke.

    `maybe_sent` is False when no connection was made, so that the service cannot have seen the request.
    """

    default_slug = "unreachable"

    def __init__(self, detail: str, *, maybe_sent: bool = False) -> None:
        super().__init__(detail)
        self.maybe_sent = maybe_sent


class DeadlineExceeded(ForestageError):
    """The caller's time ran out before the service had answered, or before the awaited job was done."""

    default_slug = "deadline-exceeded"


_BY_STATUS: dict[int, type[ForestageError]] = {
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    409: Conflict,
    410: Gone,
    413: TooLarge,
    429: QueueFull,
    503: Stopping,
}


def error_for(status: int, slug: str | None, detail: str, retry_after_s: float | None) -> ForestageError:
    """Return the error for an answer that is none of 2xx; unlisted 4xx are BadRequest, all others ServerFault."""
    otherwise = BadRequest if 400 <= status < 500 else ServerFault
    kind = _BY_STATUS.get(status, otherwise)
    return kind(detail, status=status, slug=slug, retry_after_s=retry_after_s)
