"""Replies of Redis, cut at any place and wrong in any way: no page gets another's bytes, no byte is left unread."""

import itertools
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contract.storage_contract import keys
from forestage.storage.base import ReadOutcome
from forestage.storage.redis.errors import DesyncError, LinkError, ReplyError
from storage.redis_wire import connected, good_value, model_of, run_lane, values
from support.resp import bulk, error

LOADED, MISSING, CORRUPT = ReadOutcome.LOADED, ReadOutcome.MISSING, ReadOutcome.CORRUPT
WRONGTYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"

KINDS = ["good", "nil", "empty", "short", "long", "huge tail", "foreign", "wrong key", "list"]


def reply_of(kind: str, page_bytes: int, page: int) -> tuple[bytes, ReadOutcome]:
    """Return a reply for a page, and what it has to count as."""
    model = model_of(page_bytes)
    key = keys(page + 2)[page]
    value = good_value(model, key)
    match kind:
        case "good":
            return bulk(value), LOADED
        case "nil":
            return bulk(None), MISSING
        case "empty":
            return bulk(b""), CORRUPT
        case "short":
            return bulk(value[:-1]), CORRUPT
        case "long":
            return bulk(value + b"\r"), CORRUPT
        case "huge tail":
            return bulk(value + bytes(200_000)), CORRUPT
        case "foreign":
            return bulk(random.Random(page).randbytes(len(value))), CORRUPT
        case "wrong key":
            return bulk(good_value(model, keys(page + 2)[page + 1])), CORRUPT
        case _:
            return error(WRONGTYPE), CORRUPT


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[begin:end] for begin, end in itertools.pairwise(bounds)]


@settings(deadline=None, max_examples=150)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=12),
    page_bytes=st.sampled_from([1, 60, 97, 4000, 4096, 20_000]),
    places=st.lists(st.integers(0, 1 << 30), max_size=8),
    window_bytes=st.sampled_from([1, 10_000, 1 << 20]),
)
def test_replies_of_any_kind_cut_anywhere(
    kinds: list[str], page_bytes: int, places: list[int], window_bytes: int
) -> None:
    model = model_of(page_bytes)
    replies = [reply_of(kind, page_bytes, page) for page, kind in enumerate(kinds)]
    stream = cut(b"".join(reply for reply, _ in replies), places)
    run = run_lane(model, len(kinds), stream, window_bytes=window_bytes)
    assert run.outcomes == [outcome for _, outcome in replies]
    assert run.lane.failure is None
    assert not run.lane.todo
    run.check(model)
    assert all(read.progress for read in run.reads)
    assert run.links[0].is_closed  # by the node's end, not before: it was in step
    assert len(run.links) == 1


@settings(deadline=None, max_examples=100)
@given(
    good=st.integers(0, 4),
    junk=st.binary(min_size=1, max_size=300),
    places=st.lists(st.integers(0, 1 << 30), max_size=4),
)
@example(good=0, junk=b"-x", places=[])
def test_what_is_no_reply_never_becomes_a_page(good: int, junk: bytes, places: list[int]) -> None:
    model = model_of(1000)
    stream = b"".join(values(model, good)) + junk + b"\r\n" + b"".join(values(model, 8)[good:])
    run = run_lane(model, 8, cut(stream, places))
    run.check(model)
    assert run.outcomes[:good] == [LOADED] * good
    # The page that the junk came for is not loaded; those behind are only if the junk was a whole reply.
    assert len(run.outcomes) == good or run.outcomes[good] is not LOADED
    # Of pages that ended those behind one that did not are reported later.
    assert run.lane._batch._open.count(0) + len(run.lane.todo) + len(run.lane.redirected) == 8


@pytest.mark.parametrize(
    "junk",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"*1\r\n$1\r\nx\r\n",
        b":1\r\n",
        b"+OK\r\n",
        b"$-2\r\n",
        b"$1e3\r\n",
        b"$\r\n",
        b"\r\n",
        b"-" + b"x" * 100_000 + b"\r\n",
        b"_\r\n",
    ],
)
def test_a_server_that_is_no_redis_is_left(junk: bytes) -> None:
    model = model_of(1000)
    run = run_lane(model, 3, [values(model, 1)[0] + junk + values(model, 3)[2]])
    assert run.outcomes == [LOADED]
    assert isinstance(run.lane.failure, DesyncError)
    assert len(run.lane.todo) == 2
    assert run.links[0].is_closed


@pytest.mark.parametrize("end", [b"\r\r", b"\n\r", b"xx"])
def test_a_value_must_end_where_its_head_says(end: bytes) -> None:
    model = model_of(1000)
    replies = values(model, 3)
    run = run_lane(model, 3, [replies[0] + replies[1][:-2] + end + replies[2]])
    assert run.outcomes == [LOADED]
    assert isinstance(run.lane.failure, DesyncError)


def test_a_value_too_long_to_read_costs_the_connection_but_no_other_page() -> None:
    model = model_of(1000)
    replies = values(model, 4)
    monster = b"$%d\r\n" % (512 << 20)
    run = run_lane(model, 4, [replies[0] + monster + bytes(5000)], [replies[2] + replies[3]])
    assert run.outcomes == [LOADED, CORRUPT, LOADED, LOADED]
    assert run.lane.failure is None
    assert len(run.links) == 2
    run.check(model)


def test_long_errors_are_read_to_their_end() -> None:
    model = model_of(1000)
    replies = values(model, 3)
    text = WRONGTYPE + "." * 20_000
    run = run_lane(model, 3, [replies[0] + error(text)[:9000], error(text)[9000:] + replies[2]])
    assert run.outcomes == [LOADED, CORRUPT, LOADED]


@pytest.mark.parametrize("at", [0, 1, 5, 9, 10, 600, 1009, 1050, 1105, 1106, 1107, 1111])
def test_an_end_anywhere_spoils_only_what_had_not_come(at: int) -> None:
    model = model_of(1000)
    replies = values(model, 3)
    run = run_lane(model, 3, [replies[0] + replies[1][:at]])
    assert run.outcomes == [LOADED] * (1 + (at >= len(replies[1])))
    assert isinstance(run.lane.failure, LinkError)
    assert run.links[0].is_closed
    run.check(model)


def test_a_refusal_is_passed_on_when_all_that_was_asked_is_answered() -> None:
    model = model_of(1000)
    replies = values(model, 4)
    refusal = error("LOADING Redis is loading the dataset in memory")
    run = run_lane(model, 4, [replies[0] + refusal + replies[2] + replies[3]])
    assert "LOADING" in str(run.lane.failure)
    assert [value.index for value in run.lane.todo] == [1]
    assert run.links[0].is_closed


def test_after_a_refusal_nothing_more_is_asked() -> None:
    model = model_of(1000)
    run = run_lane(model, 4, [values(model, 1)[0] + error("NOAUTH Authentication required.")], window_bytes=1)
    assert run.outcomes == [LOADED]
    assert "NOAUTH" in str(run.lane.failure)
    assert [value.index for value in run.lane.todo] == [1, 2, 3]


# ---- flags


@settings(deadline=None, max_examples=100)
@given(
    answers=st.lists(st.sampled_from([b":0\r\n", b":1\r\n", b":2\r\n", b":17\r\n", error(WRONGTYPE)]), max_size=3000),
    places=st.lists(st.integers(0, 1 << 30), max_size=4),
)
def test_flags(answers: list[bytes], places: list[int]) -> None:
    with connected() as (link, server):
        server.settimeout(10)
        errors: list[tuple[int, str]] = []

        def note(place: int, failure: ReplyError) -> None:
            errors.append((place, failure.code))

        flags = bytearray()
        stream = b"".join(answers)
        server.setsockopt(1, 7, 1 << 20)  # SOL_SOCKET, SO_SNDBUF: everything fits in
        for piece in cut(stream, places):
            server.sendall(piece)
        link.replies.read_flags(flags, len(answers), note)
        assert list(flags) == [int(answer[:2] in (b":1", b":2")) for answer in answers]
        assert errors == [(place, "WRONGTYPE") for place, answer in enumerate(answers) if answer[:1] == b"-"]
        assert link.replies.is_empty
        server.sendall(b":7\r\n")
        assert link.replies.read_number() == 7


def test_a_flag_must_be_a_number() -> None:
    with connected() as (link, server):
        server.sendall(b":1\r\n+OK\r\n")
        with pytest.raises(DesyncError):
            link.replies.read_flags(bytearray(), 2, lambda place, failure: None)
