"""Answers become values; unknown members do not matter, missing ones are named."""

import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from forestage_client import Component, Lease, Lengths, LookupLengths, Model, Region, _answers

JOB: dict[str, Any] = {
    "request_id": "r-1",
    "model": "demo",
    "state": "done",
    "outcome": "partial",
    "page_tokens": 64,
    "pages": {"requested": 12, "host": 3, "stored": 12, "restorable": 12, "granted": 8, "ready": 8},
    "tokens": {"requested": 768, "host": 192, "stored": 768, "restorable": 768, "granted": 512, "ready": 512},
    "loaded": 5,
    "joined": 0,
    "shortfall": {"host_capacity": 4},
    "lease": {"id": "l-1", "expires_in_ms": 30000},
    "slots": {"kv": [7, 2, 9], "mamba": [1]},
    "timing_ms": {"queued": 0.1, "probe": 1.2, "load": 9.8, "total": 11},
}
POOL: dict[str, Any] = {
    "path": "/dev/shm/forestage/pool",
    "bytes": 1 << 30,
    "instance": "a1b2",
    "generation": 4,
    "regions": {
        "demo": {"kv": {"offset": 8192, "slot_bytes": 65536, "slots": 10, "shards": 1, "shard_bytes": 65536}},
    },
}
MODELS: dict[str, Any] = {
    "models": [
        {
            "name": "demo",
            "page_tokens": 64,
            "shards": 2,
            "dtype": "bfloat16",
            "layout": "page_first",
            "fingerprint": "00ff",
            "components": [
                {"name": "kv", "bytes": 65536, "covers": "every_page", "shards": 1},
                {"name": "mamba", "bytes": 9, "covers": "tail", "window": 1, "shards": 2, "slots": 64},
            ],
        }
    ]
}
LOOKUP = {
    "pages": {"requested": 4, "host": 0, "stored": 3, "restorable": 2, "grantable": 1},
    "tokens": {"requested": 256, "host": 0, "stored": 192, "restorable": 128, "grantable": 64},
}
INFO = {"version": "1.0", "storage": "file", "pinned": "mlock", "uptime_s": 3.5}


def test_a_job_is_read_whole() -> None:
    job = _answers.read_prefetch(JOB)
    assert job.pages == Lengths(12, 3, 12, 12, 8, 8)
    assert job.tokens.ready == 512
    assert (job.request_id, job.model, job.state, job.outcome, job.done) == ("r-1", "demo", "done", "partial", True)
    assert (job.page_tokens, job.loaded, job.joined, job.shortfall) == (64, 5, 0, {"host_capacity": 4})
    assert job.lease == Lease("l-1", 30000)
    assert job.slots == {"kv": (7, 2, 9), "mamba": (1,)}
    assert job.timing_ms == {"queued": 0.1, "probe": 1.2, "load": 9.8, "total": 11.0}
    assert pickle.loads(pickle.dumps(job)) == job


def test_a_running_job_has_no_outcome_slots_or_lease() -> None:
    running = {name: JOB[name] for name in JOB if name not in ("outcome", "lease", "slots", "shortfall", "timing_ms")}
    job = _answers.read_prefetch({**running, "state": "loading"})
    assert (job.done, job.outcome, job.lease, job.slots, job.shortfall) == (False, None, None, {}, {})
    assert _answers.read_prefetch({**running, "outcome": None, "lease": None, "slots": None}).slots == {}


def test_slot_lists_may_be_bin() -> None:
    assert _answers.read_prefetch({**JOB, "slots": {"kv": b"\x07\0\0\0\x02\0\0\0"}}).slots == {"kv": (7, 2)}


def test_a_pool_is_read_whole() -> None:
    pool = _answers.read_pool(POOL)
    assert pool.regions == {"demo": {"kv": Region(8192, 65536, 10, 1, 65536)}}
    assert (pool.path, pool.bytes, pool.instance, pool.generation) == ("/dev/shm/forestage/pool", 1 << 30, "a1b2", 4)


def test_models_are_read_bare_or_under_their_name() -> None:
    (model,) = _answers.read_models(MODELS)
    kv, mamba = Component("kv", 65536), Component("mamba", 9, "tail", 1, 2, 64)
    assert model == Model("demo", 64, (kv, mamba), 2, fingerprint="00ff")
    assert (kv.is_tail, mamba.is_tail) == (False, True)
    assert _answers.read_models(MODELS["models"]) == (model,)


def test_lookups_and_info() -> None:
    found = _answers.read_lookup(LOOKUP)
    assert (found.pages, found.tokens.grantable) == (LookupLengths(4, 0, 3, 2, 1), 64)
    info = _answers.read_info({**INFO, "later": 1})
    assert (info.version, info.storage, info.pinned, info.uptime_s) == ("1.0", "file", "mlock", 3.5)
    assert info.fields["later"] == 1


def test_lengths_a_lease_does_not_name_are_the_device_pages() -> None:
    leased = _answers.read_leased({"pages": {"requested": 9, "ready": 5}, "slots": {"kv": [1, 2]}}, 3)
    assert leased.pages == Lengths(9, 3, 3, 3, 3, 5)
    assert (leased.lease, leased.slots) == (None, {"kv": (1, 2)})


def test_a_renewed_lease_may_be_bare() -> None:
    lease = {"id": "l-1", "expires_in_ms": 1500.4}
    assert _answers.read_renewed(lease) == _answers.read_renewed({"lease": lease}) == Lease("l-1", 1500)


def add_unknown(value: object) -> None:
    if isinstance(value, dict):
        for member in list(value.values()):
            add_unknown(member)
        if "kv" not in value and "demo" not in value and not all(isinstance(v, int | float) for v in value.values()):
            value["from_the_future"] = {"a": [1]}
    elif isinstance(value, list):
        for member in value:
            add_unknown(member)


@pytest.mark.parametrize(
    ("read", "answer"),
    [
        (_answers.read_prefetch, JOB),
        (_answers.read_lookup, LOOKUP),
        (lambda answer: _answers.read_leased(answer, 0), JOB),
        (_answers.read_pool, POOL),
        (_answers.read_models, MODELS),
    ],
)
def test_unknown_members_are_ignored(read: Callable[[object], object], answer: dict[str, Any]) -> None:
    newer = deepcopy(answer)
    add_unknown(newer)
    assert newer != answer
    assert read(newer) == read(answer)


@pytest.mark.parametrize(
    ("read", "answer", "complaint"),
    [
        (_answers.read_prefetch, [], "expected an object"),
        (_answers.read_prefetch, {}, "request_id is missing"),
        (_answers.read_prefetch, {**JOB, "model": 3}, "model must be a string"),
        (_answers.read_prefetch, {**JOB, "loaded": "5"}, "expected a number"),
        (_answers.read_prefetch, {**JOB, "loaded": float("inf")}, "expected a number"),
        (_answers.read_prefetch, {**JOB, "pages": {"requested": 1}}, "host is missing"),
        (_answers.read_prefetch, {**JOB, "slots": {"kv": b"123"}}, "slot list"),
        (_answers.read_prefetch, {**JOB, "timing_ms": {"load": "x"}}, "expected a number"),
        (_answers.read_models, {"model": []}, "models must be a list"),
        (_answers.read_models, [{**MODELS["models"][0], "components": None}], "components must be a list"),
        (_answers.read_pool, {**POOL, "regions": {"demo": []}}, "expected an object"),
    ],
)
def test_answers_without_their_shape_are_value_errors(
    read: Callable[[object], object], answer: object, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        read(answer)


GRANTED = {
    "id": "w",
    "stored": [1],
    "granted": 2,
    "reason": None,
    "slots": {"kv": [4, None], "mamba": b"\7\0\0\0", "window": []},
    "instance": "i",
    "generation": 3,
    "expires_in_ms": 1500,
}


def test_a_write_is_read_with_gaps_and_without() -> None:
    write = _answers.read_write(GRANTED | {"more": 1}, "m", 2, {"mamba": (1,)}, 10.0)
    assert write.slots == {"kv": (4, None), "mamba": (7,), "window": ()}
    assert (write.stored, write.tails, write.expires_at_s) == ((1,), {"mamba": (1,)}, 11.5)


@pytest.mark.parametrize(
    "change",
    [
        {"slots": {"kv": [4]}},
        {"slots": {"kv": [4, None], "mamba": []}},
        {"slots": {"kv": [4, "x"]}},
        {"slots": None, "stored": 3},
        {"stored": 3},
        {"stored": ["x"]},
        {"instance": 5},
        {"expires_in_ms": None},
    ],
)
def test_a_write_without_its_shape_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        _answers.read_write({**GRANTED, **change}, "m", 2, {"mamba": (1,)}, 10.0)
