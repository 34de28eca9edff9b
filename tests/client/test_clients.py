"""The whole surface, once for each client, encoding and way to the service."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from client.both_clients import Clients
from client.stub_server import StubServer
from forestage_client import (
    AsyncClient,
    BadRequest,
    Client,
    Component,
    Conflict,
    Encoding,
    Evicted,
    Gone,
    Lengths,
    LookupLengths,
    Model,
    NotFound,
    Readiness,
    Stopping,
    Unauthorized,
)
from forestage_client.testing import FakeForestage

KEYS = [bytes([page]) * 32 for page in range(12)]
MODEL = Model(
    "acme/hybrid",
    page_tokens=16,
    components=(Component("kv", 8192, shards=2), Component("mamba", 32768, "tail", window=2, shards=2, slots=4)),
    fingerprint="00ff",
)
NAME = MODEL.name


@pytest.fixture
def fake() -> FakeForestage:
    fake = FakeForestage([MODEL], pool_pages=10, token="t")
    fake.store(NAME, KEYS[:11], {"mamba": [4, 9]})
    return fake


@pytest.fixture(params=["msgpack", "json"])
def encoding(request: pytest.FixtureRequest) -> Encoding:
    return cast("Encoding", request.param)


@pytest.fixture(params=["in memory", "tcp", "unix"])
def client(
    clients: Clients, fake: FakeForestage, encoding: Encoding, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Client]:
    if request.param == "in memory":
        yield clients.of(fake, encoding=encoding)
    else:
        with StubServer(fake.answer, tmp_path / "s" if request.param == "unix" else None) as server:
            yield clients.connect(server.url, token="t", encoding=encoding)


def test_the_whole_surface(client: Client, fake: FakeForestage) -> None:
    keys = [key.hex() for key in KEYS]

    assert client.lookup(NAME, keys).pages == LookupLengths(requested=12, host=0, stored=11, restorable=9, grantable=9)
    assert client.lookup(NAME, keys, device_pages=3).tokens.host == 3 * 16
    assert client.lease(NAME, keys).lease is None

    job = client.prefetch(NAME, keys, request_id="r", min_pages=1, priority=2, wait_ms=1000, lease_ms=500, tenant="x")
    assert (job.request_id, job.model, job.state, job.outcome) == ("r", NAME, "done", "partial")
    assert job.pages == Lengths(requested=12, host=0, stored=11, restorable=9, granted=9, ready=9)
    assert job.tokens.ready == 9 * 16
    assert job.shortfall == {"not_stored": 1, "no_boundary": 2}
    assert (job.loaded, job.joined, job.page_tokens) == (9, 0, 16)
    assert {name: len(set(slots)) for name, slots in job.slots.items()} == {"kv": 9, "mamba": 2}
    assert job.lease is not None
    assert job.lease.expires_in_ms == 500
    assert client.get_prefetch("r") == client.finish("r") == client.wait("r", 1) == job
    assert client.prefetch(
        NAME, KEYS, request_id="r", min_pages=1, priority=2, wait_ms=7, lease_ms=500, tenant="x"
    ) == (job)
    with pytest.raises(Conflict):
        client.prefetch(NAME, KEYS[1:], request_id="r")

    assert client.renew(job.lease.id, 1500).expires_in_ms == 1500
    leased = client.lease(NAME, KEYS, device_pages=2)
    assert leased.pages == Lengths(requested=12, host=9, stored=9, restorable=9, granted=9, ready=9)
    assert leased.slots == {"kv": job.slots["kv"][2:], "mamba": job.slots["mamba"]}
    assert leased.lease is not None
    assert fake.num_leases == 2
    client.release(leased.lease.id)
    client.release(leased.lease.id)
    with pytest.raises(Gone):
        client.renew(leased.lease.id, 1000)

    assert client.evict(NAME, KEYS[:9], tenant="x") == Evicted(evicted=0, kept=9)
    client.cancel("r")
    client.cancel("r")
    assert fake.num_leases == 0

    pinned = client.pin(NAME, KEYS, 700, device_pages=2, tenant="x")
    assert pinned.pages == Lengths(requested=12, host=9, stored=9, restorable=9, granted=9, ready=9)
    assert (pinned.expires_in_ms, fake.num_leases, fake.num_pins) == (700, 0, 1)
    assert pinned.id is not None
    with pytest.raises(Gone):
        client.renew(pinned.id, 1000)
    assert client.evict(NAME, keys) == Evicted(evicted=2, kept=7)
    client.unpin(pinned.id)
    client.unpin(pinned.id)
    assert fake.num_pins == 0
    assert client.evict(NAME, KEYS, device_pages=4) == Evicted(evicted=5, kept=0)
    nothing = client.pin(NAME, [b"\xff" * 32], 700)
    assert (nothing.id, nothing.pages.ready, nothing.expires_in_ms) == (None, 0, 0)
    with pytest.raises(BadRequest):
        client.pin(NAME, keys, 0)
    with pytest.raises(NotFound):
        client.get_prefetch("r", wait_ms=10)
    with pytest.raises(NotFound):
        client.prefetch("nobody", KEYS)

    (model,) = client.models()
    assert model == MODEL
    regions = client.pool().regions[NAME]
    assert {name: region.slots for name, region in regions.items()} == {"kv": 10, "mamba": 4}
    assert regions["mamba"].slot_bytes == 2 * 32768
    assert client.info().fields["storage"] == "fake"
    assert client.healthy() is True
    assert client.ready() == Readiness(True, "up")
    assert "forestage_leases 0" in client.metrics()

    fake.stop()
    assert client.healthy()
    assert not client.ready()
    with pytest.raises(Stopping):
        client.prefetch(NAME, KEYS)


def test_a_wrong_token_opens_only_what_is_open(clients: Clients, fake: FakeForestage, encoding: Encoding) -> None:
    client = clients.of(fake, token="wrong", encoding=encoding)
    with pytest.raises(Unauthorized):
        client.models()
    assert client.healthy()
    assert client.ready()
    assert client.metrics()


def test_both_clients_have_one_surface() -> None:
    def surface(kind: type) -> dict[str, inspect.Signature]:
        methods = inspect.getmembers(kind, inspect.isfunction)
        return {name: inspect.signature(method) for name, method in methods if not name.startswith("_")}

    blocking, awaited = surface(Client), surface(AsyncClient)
    assert blocking.pop("close") == awaited.pop("aclose")
    # The one that is entered, not called: an ordinary and an asynchronous context manager.
    entered = [kind.pop("write") for kind in (blocking, awaited)]
    assert entered[0].parameters == entered[1].parameters
    assert Client.write.__doc__ == AsyncClient.write.__doc__
    # The one that is iterated over, as ordinary and as asynchronous iterators are.
    iterated = [kind.pop("events") for kind in (blocking, awaited)]
    assert iterated[0].parameters == iterated[1].parameters
    assert Client.events.__doc__ == AsyncClient.events.__doc__
    assert blocking == awaited
    assert inspect.signature(Client) == inspect.signature(AsyncClient)
    assert all(inspect.iscoroutinefunction(getattr(AsyncClient, name)) for name in awaited)
    for name in blocking:
        assert getattr(Client, name).__doc__ == getattr(AsyncClient, name).__doc__
