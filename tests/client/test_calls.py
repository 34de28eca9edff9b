"""What each call sends, and which error an answer becomes."""

import json
import pickle
from collections.abc import Mapping

import pytest

from forestage_client import (
    BadRequest,
    Conflict,
    DeadlineExceeded,
    ForestageError,
    Gone,
    Hint,
    NotFound,
    QueueFull,
    Readiness,
    ServerFault,
    Stopping,
    TooLarge,
    Unauthorized,
    Unreachable,
    WritePart,
    _calls,
)
from forestage_client._calls import Answer, Call

KEY = "0f" * 32
JSON: Mapping[str, str] = {"content-type": "application/json"}


def everything(wait_ms: int | None) -> Call[object]:
    return _calls.prefetch(
        "m",
        [KEY],
        request_id="r",
        device_pages=1,
        min_pages=2,
        priority=-3,
        deadline_ms=4,
        wait_ms=wait_ms,
        lease_ms=6,
        tenant="t",
    )


def least(request_id: str | None = "r") -> Call[object]:
    return _calls.prefetch(
        "m",
        [KEY],
        request_id=request_id,
        device_pages=0,
        min_pages=None,
        priority=None,
        deadline_ms=None,
        wait_ms=None,
        lease_ms=None,
        tenant=None,
    )


ALL_FIELDS = {"device_pages": 1, "min_pages": 2, "priority": -3, "deadline_ms": 4, "wait_ms": 5, "lease_ms": 6}


@pytest.mark.parametrize(
    ("call", "line", "body"),
    [
        (everything(5), "POST /v1/prefetch", {"model": "m", "request_id": "r", "tenant": "t", **ALL_FIELDS}),
        (least(), "POST /v1/prefetch", {"model": "m", "request_id": "r", "device_pages": 0}),
        (_calls.get_prefetch("r:1", 0), "GET /v1/prefetch/r:1", None),
        (_calls.get_prefetch("r", 70), "GET /v1/prefetch/r?wait_ms=70", None),
        (_calls.finish("r"), "POST /v1/prefetch/r/finish", None),
        (_calls.cancel("a/b?c"), "DELETE /v1/prefetch/a%2Fb%3Fc", None),
        (_calls.lookup("m", [KEY], 0, None), "POST /v1/lookup", {"model": "m", "device_pages": 0}),
        (_calls.lookup("m", [KEY], 0, "t"), "POST /v1/lookup", {"model": "m", "device_pages": 0, "tenant": "t"}),
        (_calls.lease("m", [KEY], 1, None, None), "POST /v1/leases", {"model": "m", "device_pages": 1}),
        (
            _calls.lease("m", [KEY], 1, 9, "t"),
            "POST /v1/leases",
            {"model": "m", "device_pages": 1, "lease_ms": 9, "tenant": "t"},
        ),
        (_calls.pin("m", [KEY], 9, 1, None), "POST /v1/pins", {"model": "m", "device_pages": 1, "ttl_ms": 9}),
        (_calls.unpin("a/b"), "DELETE /v1/pins/a%2Fb", None),
        (_calls.evict("m", [KEY], 1, "t"), "POST /v1/evict", {"model": "m", "device_pages": 1, "tenant": "t"}),
        (_calls.renew("l", 9), "POST /v1/leases/l/renew", {"lease_ms": 9}),
        (_calls.release("l"), "DELETE /v1/leases/l", None),
        (_calls.begin_write("m", [KEY], None, None), "POST /v1/writes", {"model": "m", "tails": {}}),
        (
            _calls.begin_write("m", [KEY], {"mamba": range(1)}, "t"),
            "POST /v1/writes",
            {"model": "m", "tails": {"mamba": [0]}, "tenant": "t"},
        ),
        (
            _calls.begin_write("m", [KEY], None, None, WritePart("r", 1, 4)),
            "POST /v1/writes",
            {"model": "m", "tails": {}, "request_id": "r", "parts": 4, "part": 1},
        ),
        (_calls.commit_write("w"), "POST /v1/writes/w/commit", None),
        (_calls.drop_write("a/b"), "DELETE /v1/writes/a%2Fb", None),
        (_calls.write_status("w", 0), "GET /v1/writes/w", None),
        (_calls.write_status("w", 70), "GET /v1/writes/w?wait_ms=70", None),
        (_calls.pool(), "GET /v1/pool", None),
        (_calls.models(), "GET /v1/models", None),
        (_calls.info(), "GET /v1/info", None),
        (_calls.healthy(), "GET /healthz", None),
        (_calls.ready(), "GET /readyz", None),
        (_calls.metrics(), "GET /metrics", None),
        (_calls.status(), "GET /v1/status", None),
        (_calls.timeline("a/b"), "GET /v1/prefetch/a%2Fb/timeline", None),
    ],
)
def test_requests(call: Call[object], line: str, body: dict[str, object] | None) -> None:
    assert f"{call.method} {call.path}" == line
    content = call.content("json")
    assert ("content-type" in call.headers("json")) == (content is not None)
    if body is None:
        assert content is None
    else:
        assert json.loads(content or b"") == (body if call.keys is None else {**body, "keys": [KEY]})


def test_waits_widen_the_time_a_call_may_take() -> None:
    assert [everything(5).wait_ms, least().wait_ms, _calls.get_prefetch("r", 70).wait_ms] == [5, 0, 70]
    assert _calls.write_status("w", 80).wait_ms == 80


def test_every_prefetch_has_an_id_of_its_own() -> None:
    ids = {json.loads(least(None).content("json") or b"")["request_id"] for _ in range(100)}
    assert len(ids) == 100


def test_every_envelope_of_hints_has_an_id_of_its_own() -> None:
    calls = [_calls.hints([Hint("release")], None, 0) for _ in range(20)]
    assert len({json.loads(call.content("json") or b"")["message_id"] for call in calls}) == 20
    assert all(call.repeatable for call in calls)
    assert _calls.hints([], "named", 0).repeatable
    assert not _calls.hints([], "", 0).repeatable


def test_only_what_would_take_slots_twice_is_not_repeatable() -> None:
    assert not _calls.lease("m", [], 0, None, None).repeatable
    assert not _calls.pin("m", [], 1, 0, None).repeatable
    assert not _calls.begin_write("m", [], None, None).repeatable
    assert all(
        call.repeatable for call in (_calls.commit_write("w"), _calls.drop_write("w"), _calls.write_status("w", 0))
    )
    safe = (least(), _calls.finish("r"), _calls.lookup("m", [], 0, None), _calls.cancel("r"), _calls.unpin("p"))
    assert all(call.repeatable for call in (*safe, _calls.evict("m", [], 0, None)))


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequest),
        (401, Unauthorized),
        (403, Unauthorized),
        (404, NotFound),
        (405, BadRequest),
        (409, Conflict),
        (410, Gone),
        (413, TooLarge),
        (415, BadRequest),
        (422, BadRequest),
        (429, QueueFull),
        (302, ServerFault),
        (500, ServerFault),
        (502, ServerFault),
        (503, Stopping),
    ],
)
@pytest.mark.parametrize("call", [_calls.pool(), _calls.metrics(), _calls.cancel("r"), _calls.renew("l", 1)])
def test_errors_by_status(call: Call[object], status: int, kind: type[ForestageError]) -> None:
    problem = {"type": "some-slug", "title": "Some title", "status": status, "detail": "what and why"}
    headers = {"content-type": "application/problem+json", "retry-after": "7"}
    with pytest.raises(ForestageError) as raised:
        call.result(Answer(status, headers, json.dumps(problem).encode()))
    error = raised.value
    assert type(error) is kind
    assert (error.status, error.slug, error.detail, str(error)) == (status, "some-slug", "what and why", "what and why")
    assert error.retry_after_s == 7


@pytest.mark.parametrize(
    ("problem_type", "slug"),
    [
        ("queue-full", "queue-full"),
        ("https://forestage.example/problems/queue-full", "queue-full"),
        ("urn:forestage:queue-full", "queue-full"),
        ("about:blank", "not-found"),
        (None, "not-found"),
        (3, "not-found"),
    ],
)
def test_slugs(problem_type: object, slug: str) -> None:
    with pytest.raises(NotFound) as raised:
        _calls.pool().result(Answer(404, {}, json.dumps({"type": problem_type}).encode()))
    assert raised.value.slug == slug


@pytest.mark.parametrize("content", [b"", b"<html>Bad gateway</html>", b"[1]", b"[" * 100_000, b"\xff"])
def test_errors_without_a_problem_body(content: bytes) -> None:
    with pytest.raises(ServerFault, match="the service answered 502") as raised:
        _calls.pool().result(Answer(502, {"retry-after": "soon"}, content))
    assert (raised.value.status, raised.value.slug, raised.value.retry_after_s) == (502, "internal", None)


@pytest.mark.parametrize(
    ("headers", "content"),
    [(JSON, b"{}"), (JSON, b"{"), ({"content-type": "text/html"}, b"<html>"), ({}, b"")],
)
def test_answers_that_make_no_sense_are_faults_of_the_server(headers: Mapping[str, str], content: bytes) -> None:
    with pytest.raises(ServerFault, match="GET /v1/pool: ") as raised:
        _calls.pool().result(Answer(200, headers, content))
    assert (raised.value.slug, raised.value.status) == ("unreadable-answer", 200)
    assert isinstance(raised.value.__cause__, ValueError)


def test_health_and_readiness_are_values() -> None:
    assert _calls.healthy().result(Answer(200, {}, b""))
    assert not _calls.healthy().result(Answer(500, {}, b""))
    assert _calls.ready().result(Answer(200, JSON, b'{"storage": "degraded"}')) == Readiness(True, "degraded")
    assert _calls.ready().result(Answer(200, JSON, b"[]")) == Readiness(True, "")
    assert not _calls.ready().result(Answer(503, {}, b""))
    with pytest.raises(NotFound):
        _calls.ready().result(Answer(404, {}, b""))


def test_no_body_is_needed_to_say_done() -> None:
    _calls.cancel("r").result(Answer(204, {}, b""))
    _calls.release("l").result(Answer(204, {}, b""))


@pytest.mark.parametrize(
    "error",
    [
        QueueFull("full", slug="s", status=429, retry_after_s=2.0),
        Unreachable("x", maybe_sent=True),
        DeadlineExceeded("x"),
    ],
)
def test_errors_may_cross_processes(error: ForestageError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), vars(copy), str(copy)) == (type(error), vars(error), str(error))
