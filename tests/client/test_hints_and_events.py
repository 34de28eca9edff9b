"""Hints, events, timelines: both clients, the same against the fake and against the service itself."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest

from client.both_clients import Clients
from client.guide import run_example
from forestage_client import (
    BadRequest,
    Client,
    Component,
    Conflict,
    Encoding,
    Hint,
    Model,
    NotFound,
    PoolEvent,
    PoolView,
    Prompt,
    Stopping,
    Unauthorized,
    Unreachable,
)
from forestage_client._errors import ForestageError
from forestage_client._pool_events import EventLines, Returning
from forestage_client.testing import FakeForestage
from support.configs import write_config
from support.running import running

KEYS = [hashlib.sha256(bytes([page])).digest() for page in range(12)]
TOKENS = list(range(12 * 16))
WAIT_MS = 20_000


class World:
    """A service or a fake with room for 12 pages whose L3 is empty, and a client of it."""

    def __init__(self, client: Client, bring: Callable[[list[bytes]], None]) -> None:
        self.client = client
        #: Makes pages resident that neither L3 nor the pool has.
        self.bring = bring


@pytest.fixture(params=["msgpack", "json"])
def encoding(request: pytest.FixtureRequest) -> Encoding:
    return cast("Encoding", request.param)


@pytest.fixture(params=["fake", "service"])
def world(clients: Clients, encoding: Encoding, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    if request.param == "fake":
        model = Model("m", page_tokens=16, components=(Component("kv", 4096, slots=12),), hash="sglang")
        fake = FakeForestage([model])

        def write(keys: list[bytes]) -> None:
            with fake.client() as other:
                other.commit_write(other.begin_write("m", keys).id)

        yield World(clients.of(fake, encoding=encoding), write)
        return
    config = write_config(tmp_path, slots=12, scheme="sglang", writes="max_dirty_fraction = 1.0")
    with (
        running(config) as service,
        Client(service.url, timeout_s=30) as other,
        PoolView(f"{tmp_path}/pool", writable=True) as view,
    ):

        def bring(keys: list[bytes]) -> None:
            with other.write(view, "m", keys) as writer:
                for page in range(len(keys)):
                    writer.put("kv", page, bytes(4096))
            other.write_status(writer.write.id, wait_ms=WAIT_MS)  # what L3 lacks cannot be evicted

        yield World(clients.connect(service.url, timeout_s=30, encoding=encoding), bring)


def test_every_kind_of_hint(world: World) -> None:
    client = world.client
    world.bring(KEYS[:4])
    prefetch = Hint("prefetch", "m", KEYS[:6], {"lease_ms": 60_000})
    done = client.hints([prefetch], message_id="one", wait_ms=WAIT_MS)
    (brought,) = done.actions
    assert done.message_id == "one"
    assert (brought.action_id, brought.action_type, brought.state) == ("0", "prefetch", "done")
    assert (brought.outcome, brought.reason, dict(brought.shortfall)) == ("missing", "not_stored", {"not_stored": 2})
    assert brought.pages is not None
    assert (brought.pages.ready, brought.pages.requested) == (4, 6)
    assert brought.request_id is not None
    assert client.get_prefetch(brought.request_id).pages == brought.pages
    assert client.hints([prefetch], message_id="one", wait_ms=WAIT_MS) == done
    with pytest.raises(Conflict):
        client.hints([Hint("demote", "m", KEYS)], message_id="one")

    options: dict[str, object] = {"ttl_ms": 60_000}
    pin, demote, nothing = client.hints(
        [
            Hint("retain", "m", [key.hex() for key in KEYS[:4]], options, action_id="keep"),
            Hint("demote", "m", KEYS[:4]),
            Hint("pin", "m", KEYS[8:], options),
        ]
    ).actions
    assert (pin.action_id, pin.outcome, pin.reason) == ("keep", "accepted", None)
    assert pin.pages is not None
    assert (pin.pages.ready, nothing.pin_id, nothing.outcome, nothing.reason) == (4, None, "missing", "not_resident")
    assert pin.expires_in_ms is not None
    assert 0 < pin.expires_in_ms <= 60_000
    assert (demote.outcome, demote.reason, demote.demoted, demote.kept) == ("clipped", "held", 0, 4)
    release = Hint("release", options={"pin_id": pin.pin_id, "request_id": brought.request_id})
    again, free = client.hints([release, Hint("demote", "m", KEYS[:6], action_id="x")], message_id="").actions
    assert (again.outcome, free.action_id, free.outcome, free.demoted) == ("accepted", "x", "accepted", 4)
    (unknown,) = client.hints([release]).actions
    assert (unknown.outcome, unknown.reason) == ("missing", "unknown")
    with pytest.raises(NotFound):
        client.get_prefetch(brought.request_id)


def test_a_wrong_hint_is_rejected_alone(world: World) -> None:
    world.bring(KEYS[:2])
    answers = world.client.hints(
        [
            Hint("kv.fetch", "m", KEYS),
            Hint("prefetch", "other", KEYS),
            Hint("prefetch", "m", KEYS, {"wait_ms": 5}),
            Hint("pin", "m", KEYS[:2]),
            Hint("release"),
            Hint("prefetch", "m", KEYS[:2]),
        ],
        wait_ms=WAIT_MS,
    ).actions
    assert [answer.outcome for answer in answers] == ["rejected"] * 5 + ["accepted"]
    assert answers[0].reason == "unknown-action"
    assert all(answer.detail for answer in answers[:5])
    with pytest.raises(BadRequest):
        world.client.hints([Hint("pin", action_id="a"), Hint("pin", action_id="a")])
    with pytest.raises(BadRequest):
        world.client.hints([Hint("prefetch", "m", cast("Any", [5]))])


def test_a_hint_may_carry_token_ids(world: World) -> None:
    keys = world.client.hash("m", Prompt(TOKENS)).keys
    world.bring(list(keys))
    (answer,) = world.client.hints([Hint("demote", "m", Prompt(TOKENS, include_keys=True))]).actions
    assert (answer.outcome, answer.demoted, answer.keys) == ("accepted", 12, keys)


def test_a_timeline_and_the_status(world: World) -> None:
    client = world.client
    world.bring(KEYS[:3])
    client.prefetch("m", KEYS[:5], request_id="told", wait_ms=WAIT_MS)
    told = client.timeline("told")
    assert (told.request_id, told.model, told.state, told.outcome) == ("told", "m", "done", "partial")
    assert (told.trace_id, told.cuts) == (None, 0)
    first, *_, last = told.moments
    assert (first.event, first.pages, last.event, last.pages) == ("arrived", 5, "done", 3)
    assert [moment.at_ms for moment in told.moments] == sorted(moment.at_ms for moment in told.moments)
    with pytest.raises(NotFound):
        client.timeline("nobody")
    status = client.status()
    assert status["finished"][0]["request_id"] == "told"
    assert sum(status["jobs"].values()) == 0
    client.cancel("told")


class Known:
    """What a follower believes to be resident."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.seen: list[str] = []
        self.last_id: str | None = None

    def take(self, event: PoolEvent) -> None:
        self.seen.append(event.event)
        self.last_id = event.id or self.last_id
        if event.event == "reset":
            assert event.instance
            assert event.generation is not None
            self.keys.clear()
        elif event.event in ("stored", "removed"):
            assert (event.model, event.component) == ("m", "kv")
            keys = set(event.keys)
            assert keys.isdisjoint(self.keys) if event.event == "stored" else keys <= self.keys
            self.keys ^= keys

    def follow(self, events: Iterator[PoolEvent], keys: set[bytes]) -> None:
        """Take events in until these pages are known, and that nothing else is."""
        for event in events:
            self.take(event)
            if self.keys == keys and "ready" in self.seen:
                return


def test_events_add_up_and_go_on(world: World) -> None:
    world.bring(KEYS[:3])
    events = world.client.events()
    known = Known()
    known.follow(events, set(KEYS[:3]))
    assert known.seen == ["reset", "stored", "ready"]
    other = [hashlib.sha256(b"other" + key).digest() for key in KEYS]
    world.bring(KEYS[3:6])
    known.follow(events, set(KEYS[:6]))
    world.client.hints([Hint("demote", "m", KEYS[:6])])
    again = world.client.events("m", known.last_id)
    world.bring(other)
    known.follow(events, set(other))
    assert "removed" in known.seen
    assert "gap" not in known.seen
    behind = next(again)
    assert behind.event in ("stored", "removed")
    cast("Any", again).close()
    cast("Any", events).close()
    foreign = list(islice(world.client.events(last_id="elsewhere"), 2))
    assert [event.event for event in foreign] == ["gap", "reset"]
    with pytest.raises(NotFound):
        next(world.client.events("other"))


def test_a_broken_stream_is_taken_up_again(clients: Clients) -> None:
    fake = FakeForestage([Model("m", page_tokens=16, components=(Component("kv", 4096),))])
    fake.store("m", KEYS)
    client = clients.of(fake)
    events, known = client.events(), Known()
    known.follow(events, set())
    fake.break_streams()
    client.prefetch("m", KEYS[:4])
    known.follow(events, set(KEYS[:4]))
    assert known.seen.count("ready") == 1
    fake.stop()
    began = time.monotonic()
    with pytest.raises(Stopping):
        list(client.events())
    assert time.monotonic() - began < 10


def test_following_ends_when_the_service_is_gone(clients: Clients, tmp_path: Path) -> None:
    with running(write_config(tmp_path)) as service:
        client = clients.connect(service.url, timeout_s=30)
        events, known = client.events(reconnect_s=0.2), Known()
        known.follow(events, set())
        stopping = threading.Thread(target=service.stop)
        stopping.start()
        with pytest.raises((Unreachable, Stopping)):
            known.follow(events, {b"never"})
        stopping.join(30)
    with pytest.raises(Unreachable):
        next(client.events())


def test_a_service_started_anew_is_followed(clients: Clients, tmp_path: Path) -> None:
    """It adopts the pool; what happened while nobody told is not missed unnoticed."""
    config = write_config(tmp_path, server=f'port = 0\nuds = "{tmp_path}/s"')
    with running(config) as first:
        client = clients.connect(f"unix:{tmp_path}/s", timeout_s=30)
        events, known = client.events(), Known()
        known.follow(events, set())
        assert first.stop() == 0
    with running(config), PoolView(f"{tmp_path}/pool", writable=True) as view:
        with Client(f"unix:{tmp_path}/s", timeout_s=30) as other, other.write(view, "m", KEYS[:2]) as writer:
            for page in range(2):
                writer.put("kv", page, bytes(4096))
        known.seen.clear()
        known.follow(events, set(KEYS[:2]))
        assert known.seen[:2] == ["gap", "reset"]
        cast("Any", events).close()


def test_the_guide_prepares_and_follows(world: World) -> None:
    names = run_example("def prepare")
    world.bring(KEYS[:4])
    assert names["prepare"](world.client, "m", [key.hex() for key in KEYS[:4]], "turn 1")
    resident: set[bytes] = set()
    counts = names["follow"](world.client, "m", resident)
    assert next(counts) == 4
    assert resident == set(KEYS[:4])
    counts.close()


def test_a_wrong_token_is_refused(clients: Clients) -> None:
    fake = FakeForestage(token="right")
    with pytest.raises(Unauthorized):
        next(clients.of(fake, token="wrong").events())


def test_lines_become_events() -> None:
    lines = EventLines(None)
    text = (
        'event: reset\ndata: {"instance":"a","generation":4}\n\n'
        ":\n\n"
        f'event: stored\ndata: {{"model":"m","component":"kv","keys":["{KEYS[0].hex()}"]}}\n\n'
        "id: a.4.7\nevent: ready\ndata: {}\n\n"
        "event: something-new\ndata: {}\n\n"
    )
    read = [event for line in text.splitlines() if (event := lines.take(line)) is not None]
    assert read == [
        PoolEvent("reset", None, instance="a", generation=4),
        PoolEvent("stored", None, "m", "kv", (KEYS[0],)),
        PoolEvent("ready", "a.4.7"),
        PoolEvent("something-new"),
    ]
    assert lines.last_id == "a.4.7"


@pytest.mark.parametrize("data", ["", "[]", "{", '{"model":"m"}', '{"model":"m","component":"kv","keys":["zz"]}'])
def test_unreadable_events_are_faults_of_the_server(data: str) -> None:
    lines = EventLines(None)
    assert lines.take("event: stored") is lines.take(f"data: {data}") is None
    with pytest.raises(ForestageError, match="unreadable event"):
        lines.take("")


def test_when_to_come_back() -> None:
    returning = Returning("a b", "x.1", 60.0)
    assert returning.path == "/v1/events?model=a+b"
    assert returning.headers["last-event-id"] == "x.1"
    gone = Unreachable("gone")
    with pytest.raises(Unreachable):
        returning.pause_after(gone)
    returning.brought()
    pauses = [returning.pause_after(gone) for _ in range(10)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 2.0
    returning.brought()
    assert returning.pause_after(gone) == pauses[0]
    with pytest.raises(Unauthorized):
        returning.pause_after(Unauthorized("no"))
    impatient = Returning(None, None, 0.0)
    impatient.brought()
    with pytest.raises(Unreachable):
        impatient.pause_after(gone)
