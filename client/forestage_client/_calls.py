"""Every route as a value: what is sent, how long it may take, and how its answer is read. No I/O here."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Never, TypeVar
from urllib.parse import quote

from forestage_client import _answers
from forestage_client._codec import MEDIA_TYPES, Encoding, Key, Keys, decode_body, encode_body
from forestage_client._errors import ServerFault, error_for
from forestage_client._types import (
    Evicted,
    Filled,
    Hashed,
    Hinted,
    Info,
    Lease,
    Leased,
    Lookup,
    Model,
    Pinned,
    Pool,
    Prefetch,
    Readiness,
    Timeline,
    Write,
    WritePart,
    WriteStatus,
)
from forestage_client.hashing.prompt import Prompt
from forestage_client.hint import Hint

__all__ = [
    "Answer",
    "Call",
    "begin_write",
    "cancel",
    "commit_write",
    "drop_write",
    "evict",
    "fill",
    "finish",
    "get_prefetch",
    "hash_prompt",
    "healthy",
    "hints",
    "info",
    "lease",
    "lookup",
    "metrics",
    "models",
    "pin",
    "pool",
    "prefetch",
    "ready",
    "release",
    "renew",
    "status",
    "timeline",
    "unpin",
    "write_status",
]

#: Longer than any service hangs unnoticed, and what a socket still takes as a time.
_UNTIL_ANSWERED_MS = 20 * 86_400_000

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer as it came; header names are compared as the mapping does it."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    def value(self) -> object:
        """Decode the body; raises ValueError."""
        return decode_body(self.content, self.headers.get("content-type", ""))

    def raise_error(self) -> Never:
        """Raise the error that this answer describes, a problem+json body or not."""
        try:
            problem = json.loads(self.content)
        except (ValueError, RecursionError):
            problem = None
        if not isinstance(problem, dict):
            problem = {}
        title = problem.get("title") or f"the service answered {self.status}"
        detail = problem.get("detail") or title
        retry_after = self.headers.get("retry-after", "")
        raise error_for(
            self.status,
            _slug(problem.get("type")),
            str(detail),
            float(retry_after) if retry_after.isdecimal() else None,
        )


@dataclass(frozen=True, slots=True)
class Call(Generic[T_co]):
    """One request. `wait_ms` is how long the service may sit on it on top of its usual time.

    `repeatable`: sending it twice has the effect of sending it once, so it may be sent again when a connection breaks.
    """

    method: str
    path: str
    read: Callable[[Answer], T_co]
    body: Mapping[str, object] | Callable[[Encoding], Mapping[str, object]] | None = None
    keys: Keys | None = None
    wait_ms: int = 0
    repeatable: bool = True

    def content(self, encoding: Encoding) -> bytes | None:
        """Write the body, if there is one. Raises BadRequest for keys that are no keys."""
        body = self.body(encoding) if callable(self.body) else self.body
        return None if body is None else encode_body(body, self.keys, encoding)

    def headers(self, encoding: Encoding) -> dict[str, str]:
        media_type = MEDIA_TYPES[encoding]
        accept = {"accept": f"{media_type}, */*;q=0.1"}  # errors are problem+json, metrics text
        return accept if self.body is None else {**accept, "content-type": media_type}

    def result(self, answer: Answer) -> T_co:
        """Read the answer; raises the ForestageError it describes, or ServerFault if it makes no sense."""
        try:
            return self.read(answer)
        except ValueError as error:
            slug, where = "unreadable-answer", f"{self.method} {self.path}"
            raise ServerFault(f"{where}: {error}", status=answer.status, slug=slug) from error


def prefetch(
    model: str,
    keys: Keys,
    *,
    request_id: str | None,
    device_pages: int,
    min_pages: int | None,
    priority: int | None,
    deadline_ms: int | None,
    wait_ms: int | None,
    lease_ms: int | None,
    tenant: str | None,
) -> Call[Prefetch]:
    body = _given(
        model=model,
        # With an id of its own, every prefetch may be sent again when a connection breaks.
        request_id=os.urandom(16).hex() if request_id is None else request_id,
        device_pages=device_pages,
        min_pages=min_pages,
        priority=priority,
        deadline_ms=deadline_ms,
        wait_ms=wait_ms,
        lease_ms=lease_ms,
        tenant=tenant,
    )
    return Call("POST", "/v1/prefetch", _body(_answers.read_prefetch), body, keys, wait_ms or 0)


def get_prefetch(request_id: str, wait_ms: int) -> Call[Prefetch]:
    query = f"?wait_ms={wait_ms}" if wait_ms else ""
    return Call("GET", _job_path(request_id) + query, _body(_answers.read_prefetch), wait_ms=wait_ms)


def finish(request_id: str) -> Call[Prefetch]:
    return Call("POST", _job_path(request_id) + "/finish", _body(_answers.read_prefetch))


def cancel(request_id: str) -> Call[None]:
    return Call("DELETE", _job_path(request_id), _nothing)


def lookup(model: str, keys: Keys, device_pages: int, tenant: str | None) -> Call[Lookup]:
    body = _given(model=model, device_pages=device_pages, tenant=tenant)
    return Call("POST", "/v1/lookup", _body(_answers.read_lookup), body, keys)


def fill(
    model: str,
    keys: Keys,
    region: str,
    targets: Mapping[str, object],
    device_pages: int,
    deadline_ms: int | None,
    tenant: str | None,
) -> Call[Filled]:
    body = _given(
        model=model, region=region, targets=targets, device_pages=device_pages, deadline_ms=deadline_ms, tenant=tenant
    )
    # Sent twice, the first might still be writing when the second is answered.
    read = _body(_answers.read_filled)
    return Call("POST", "/v1/fills", read, body, keys, wait_ms=_UNTIL_ANSWERED_MS, repeatable=False)


def hash_prompt(model: str, prompt: Prompt) -> Call[Hashed]:
    return Call("POST", "/v1/hash", _body(_answers.read_hashed), {"model": model}, replace(prompt, include_keys=False))


def lease(model: str, keys: Keys, device_pages: int, lease_ms: int | None, tenant: str | None) -> Call[Leased]:
    def read(answer: object) -> Leased:
        return _answers.read_leased(answer, device_pages)

    body = _given(model=model, device_pages=device_pages, lease_ms=lease_ms, tenant=tenant)
    # A second lease would hold the slots until it expires, with nobody to release it.
    return Call("POST", "/v1/leases", _body(read), body, keys, repeatable=False)


def renew(lease_id: str, lease_ms: int) -> Call[Lease]:
    path = f"/v1/leases/{quote(lease_id, safe=':')}/renew"
    return Call("POST", path, _body(_answers.read_renewed), _given(lease_ms=lease_ms))


def release(lease_id: str) -> Call[None]:
    return Call("DELETE", f"/v1/leases/{quote(lease_id, safe=':')}", _nothing)


def begin_write(
    model: str,
    keys: Sequence[Key],
    tails: Mapping[str, Sequence[int]] | None,
    tenant: str | None,
    part: WritePart | None = None,
) -> Call[Write]:
    """Ask for slots. Its time counts from here: send the call at once."""
    pages = {component: tuple(indexes) for component, indexes in (tails or {}).items()}
    asked_s = time.monotonic()

    def read(answer: object) -> Write:
        return _answers.read_write(answer, model, len(keys), pages, asked_s)

    given = {component: list(indexes) for component, indexes in pages.items()}
    body = _given(model=model, tails=given, tenant=tenant)
    if part is not None:
        body |= {"request_id": part.request_id, "parts": part.parts, "part": part.part}
    # A second write would hold slots until it expires, with nobody to fill them.
    return Call("POST", "/v1/writes", _body(read), body, keys, repeatable=False)


def commit_write(write_id: str) -> Call[WriteStatus]:
    return Call("POST", f"{_write_path(write_id)}/commit", _body(_answers.read_write_status))


def drop_write(write_id: str) -> Call[None]:
    return Call("DELETE", _write_path(write_id), _nothing)


def write_status(write_id: str, wait_ms: int) -> Call[WriteStatus]:
    query = f"?wait_ms={wait_ms}" if wait_ms else ""
    return Call("GET", _write_path(write_id) + query, _body(_answers.read_write_status), wait_ms=wait_ms)


def pin(model: str, keys: Keys, ttl_ms: int, device_pages: int, tenant: str | None) -> Call[Pinned]:
    body = _given(model=model, device_pages=device_pages, ttl_ms=ttl_ms, tenant=tenant)
    # As with a lease, nobody would know the id of a second one.
    return Call("POST", "/v1/pins", _body(_answers.read_pinned), body, keys, repeatable=False)


def unpin(pin_id: str) -> Call[None]:
    return Call("DELETE", f"/v1/pins/{quote(pin_id, safe=':')}", _nothing)


def evict(model: str, keys: Keys, device_pages: int, tenant: str | None) -> Call[Evicted]:
    body = _given(model=model, device_pages=device_pages, tenant=tenant)
    return Call("POST", "/v1/evict", _body(_answers.read_evicted), body, keys)


def hints(actions: Sequence[Hint], message_id: str | None, wait_ms: int) -> Call[Hinted]:
    # With an id of its own, every envelope may be sent again when a connection breaks.
    name = os.urandom(16).hex() if message_id is None else message_id

    def envelope(encoding: Encoding) -> Mapping[str, object]:
        described = [action.describe(place, encoding) for place, action in enumerate(actions)]
        return {"protocol_version": "1.0", "message_id": name, "actions": described}

    query = f"?wait_ms={wait_ms}" if wait_ms else ""
    read = _body(_answers.read_hinted)
    return Call("POST", f"/v1/hints{query}", read, envelope, wait_ms=wait_ms, repeatable=bool(name))


def pool() -> Call[Pool]:
    return Call("GET", "/v1/pool", _body(_answers.read_pool))


def models() -> Call[tuple[Model, ...]]:
    return Call("GET", "/v1/models", _body(_answers.read_models))


def info() -> Call[Info]:
    return Call("GET", "/v1/info", _body(_answers.read_info))


def healthy() -> Call[bool]:
    return Call("GET", "/healthz", lambda answer: answer.status == 200)


def ready() -> Call[Readiness]:
    return Call("GET", "/readyz", _readiness)


def status() -> Call[Mapping[str, Any]]:
    return Call("GET", "/v1/status", _body(_answers.read_object))


def timeline(request_id: str) -> Call[Timeline]:
    return Call("GET", f"{_job_path(request_id)}/timeline", _body(_answers.read_timeline))


def metrics() -> Call[str]:
    return Call("GET", "/metrics", _as_text)


def _given(**members: object) -> dict[str, object]:
    """Leave out what the caller left to the service."""
    return {name: value for name, value in members.items() if value is not None}


def _body(read: Callable[[object], T]) -> Callable[[Answer], T]:
    def read_answer(answer: Answer) -> T:
        return read(_checked(answer).value())

    return read_answer


def _nothing(answer: Answer) -> None:
    _checked(answer)


def _as_text(answer: Answer) -> str:
    return _checked(answer).content.decode()


def _readiness(answer: Answer) -> Readiness:
    if answer.status == 503:
        return Readiness(False)
    value = _checked(answer).value()
    storage = value.get("storage") if isinstance(value, dict) else None
    return Readiness(True, storage if isinstance(storage, str) else "")


def _checked(answer: Answer) -> Answer:
    if not 200 <= answer.status < 300:
        answer.raise_error()
    return answer


def _job_path(request_id: str) -> str:
    return f"/v1/prefetch/{quote(request_id, safe=':')}"


def _write_path(write_id: str) -> str:
    return f"/v1/writes/{quote(write_id, safe=':')}"


def _slug(problem_type: object) -> str | None:
    # RFC 9457 wants a URI reference, so that the slug may be the end of one.
    if not isinstance(problem_type, str) or problem_type in ("", "about:blank"):
        return None
    return problem_type.rstrip("/").rpartition("/")[2].rpartition(":")[2]
