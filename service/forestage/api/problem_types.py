"""The types of problems, each with its status and when it is answered, as OpenAPI and the API reference say it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, Field

__all__ = ["PROBLEM_MEDIA", "PROBLEM_TYPES", "Problem", "ProblemType", "problem_answers"]

PROBLEM_MEDIA = "application/problem+json"


class Problem(BaseModel):
    """Why a request was refused (RFC 9457)."""

    type: str = Field(description="Which problem it is; stable.")
    title: str = Field(description="The status in words.")
    status: int = Field(description="That of the answer.")
    detail: str = Field(description="For people.")


class ProblemType(NamedTuple):
    """An HTTP status, and when it is answered with this type."""

    status: int
    when: str


PROBLEM_TYPES: Mapping[str, ProblemType] = {
    "unparsable": ProblemType(400, "the body is not what its Content-Type says"),
    "unauthorized": ProblemType(401, "no valid bearer token, where one is configured"),
    "role-needed": ProblemType(403, "the token's role does not allow this route"),
    "other-tenant": ProblemType(403, "the token is that of one tenant, and `tenant` names another"),
    "service-token-needed": ProblemType(403, "the token is that of one tenant, and this tells of all"),
    "not-found": ProblemType(404, "no such route"),
    "unknown-model": ProblemType(404, "no model of this name is configured"),
    "unknown-job": ProblemType(404, "no job of this id: never begun, deleted, or forgotten"),
    "unknown-write": ProblemType(404, "no write of this id: never begun, dropped, or forgotten"),
    "method-not-allowed": ProblemType(405, "the route takes other methods, named in `Allow`"),
    "request-timeout": ProblemType(408, "the request was not whole within `server.request_timeout_ms`"),
    "request-id-conflict": ProblemType(
        409, "the `request_id` belongs to a job, or to an open write, of another request"
    ),
    "part-taken": ProblemType(409, "another process fills that `part` of the write"),
    "message-id-conflict": ProblemType(409, "the `message_id` belongs to an earlier envelope of other content"),
    "lease-gone": ProblemType(410, "the lease has expired, was released, or never existed"),
    "write-gone": ProblemType(410, "the write expired before it was committed"),
    "region-gone": ProblemType(
        410, "the region was never registered, its connection has ended, or it cannot be written to"
    ),
    "too-large": ProblemType(413, "more than `server.max_body_bytes` or `prefetch.max_pages`"),
    "unsupported-media-type": ProblemType(415, "neither JSON nor MessagePack"),
    "invalid-request": ProblemType(422, "a wrong shape or value, or an unknown field"),
    "duplicate-key": ProblemType(422, "a page key occurs twice"),
    "no-hash-scheme": ProblemType(422, "token ids for a model whose configuration names no `hash`"),
    "queue-full": ProblemType(429, "`prefetch.queue_limit` jobs wait already; come back after `Retry-After` seconds"),
    "limit-reached": ProblemType(429, "as many of these as there may be; release some, or come back later"),
    "too-many-listeners": ProblemType(
        429, "`events.max_listeners` listen already; come back after `Retry-After` seconds"
    ),
    "internal": ProblemType(500, "a defect; the log of the service has the details"),
    "stopping": ProblemType(503, "the service is stopping"),
    "too-many-connections": ProblemType(503, "`server.max_connections` are being answered; come back later"),
    "pool-unlinked": ProblemType(503, "the pool file is gone from its path"),
}


def problem_answers(*slugs: str) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI part that says which types of problems a route answers with."""
    content = {PROBLEM_MEDIA: {"schema": {"$ref": f"#/components/schemas/{Problem.__name__}"}}}
    answers: dict[int | str, dict[str, Any]] = {}
    for slug in slugs:
        kind = PROBLEM_TYPES[slug]
        said = f"`{slug}`: {kind.when}"
        if kind.status in answers:
            said = f"{answers[kind.status]['description']}; {said}"
        answers[kind.status] = {"description": said, "content": content}
    return answers
