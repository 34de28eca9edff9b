"""The fake service tells the truth: the sample manifests, the laws of lengths and slots, refusals, clocks."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client.guide import run_example
from forestage_client import (
    BadRequest,
    Client,
    Component,
    Conflict,
    Evicted,
    Gone,
    Model,
    NotFound,
    Prefetch,
    QueueFull,
    WriteStatus,
)
from forestage_client._fake_service import FakeService
from forestage_client.testing import FakeForestage
from support.manifests import Sample

SAMPLES = [Sample.load("hicache-hybrid"), Sample.load("hicache-mla")]
KEYS = [bytes([page]) * 32 for page in range(20)]
OTHERS = [bytes([100 + page]) * 32 for page in range(20)]
HYBRID = Model("demo", 16, (Component("kv", 8), Component("mamba", 8, "tail", window=1, slots=2)))


def needs_no_bad_bytes(sample: Sample, case: dict[str, Any]) -> bool:
    """The fake has no bytes: it knows of pages that are gone, not of bad ones or of those that go meanwhile."""
    change = case.get("change", {"when": "before", "remove": ""})
    reads_short_page = "corrupt" in case["expect"]["shortfall"]
    return change["when"] == "before" and ("remove" in change or "rewrite" in change) and not reads_short_page


CASES = [
    pytest.param(sample, case, id=f"{sample.name}-{case['id']}")
    for sample in SAMPLES
    for case in sample.cases()
    if needs_no_bad_bytes(sample, case)
]


def fake_of(sample: Sample, case: dict[str, Any]) -> FakeForestage:
    described = sample.manifest["model"]
    components = [
        Component(c["name"], c["bytes"], c["covers"], c.get("window", 0), slots=case["pool_slots"][c["name"]])
        for c in described["components"]
    ]
    fake = FakeForestage([Model(described["name"], described["page_tokens"], tuple(components))])
    for chain in sample.manifest["chains"].values():
        states = {"mamba": chain["states_at"]} if "states_at" in chain else {}
        fake.store(described["name"], chain["keys"], states)
    removed = case.get("change", {}).get("remove")
    if removed is not None:
        fake.forget(described["name"], [removed[:64]], "mamba" if ".mamba" in removed else "kv")
    return fake


def run(client: Client, sample: Sample, case: dict[str, Any]) -> Prefetch:
    request = case["request"]
    return client.prefetch(
        sample.manifest["model"]["name"],
        sample.keys(request),
        device_pages=request["device_pages"],
        min_pages=request["min_pages"],
    )


def test_most_sample_cases_need_no_bytes() -> None:
    assert len(CASES) == 32


@pytest.mark.parametrize(("sample", "case"), CASES)
def test_sample_case(sample: Sample, case: dict[str, Any]) -> None:
    expect = case["expect"]
    with fake_of(sample, case).client() as client:
        if "after" in case:
            earlier = run(client, sample, sample.case(case["after"]["case"]))
            assert earlier.lease is not None
            if case["after"]["lease"] == "released":
                client.release(earlier.lease.id)
        found = client.lookup(sample.manifest["model"]["name"], sample.keys(case["request"]), 0)
        if found.boundaries is not None:
            assert max(found.boundaries, default=0) == found.pages.restorable
        job = run(client, sample, case)
    assert {name: getattr(job.pages, name) for name in expect["pages"]} == expect["pages"]
    page_tokens = sample.manifest["model"]["page_tokens"]
    assert {name: getattr(job.tokens, name) // page_tokens for name in expect["pages"]} == expect["pages"]
    assert (job.done, job.outcome, job.shortfall) == (True, expect["outcome"], expect["shortfall"])
    assert expect["loaded"] in (None, job.loaded)
    assert {name: len(set(slots)) for name, slots in job.slots.items()} == (expect["slots"] or {})
    assert (job.lease is None) == (expect["slots"] is None)
    if not case["request"]["device_pages"]:
        pages = expect["pages"]
        names = ("requested", "host", "stored", "restorable")
        assert {name: getattr(found.pages, name) for name in names} == {name: pages[name] for name in names}
        assert found.pages.grantable == pages["granted"]


@pytest.fixture
def fake() -> FakeForestage:
    fake = FakeForestage(pool_pages=8, queue_limit=2)
    fake.store("demo", KEYS)
    fake.store("demo", OTHERS)
    return fake


@pytest.fixture
def client(fake: FakeForestage) -> Iterator[Client]:
    with fake.client() as client:
        yield client


def test_leases_end_by_the_clock(fake: FakeForestage, client: Client) -> None:
    job = client.prefetch("demo", KEYS[:5], request_id="r", lease_ms=2000)
    assert job.lease is not None
    fake.now_s = 1.5
    renewed = client.get_prefetch("r").lease
    assert renewed is not None
    assert renewed.expires_in_ms == 500
    assert client.renew(job.lease.id, 1000).expires_in_ms == 1000
    fake.now_s = 2.4
    assert fake.num_leases == 1
    fake.now_s = 2.5
    assert fake.num_leases == 0
    expired = client.get_prefetch("r")
    assert (expired.lease, expired.slots, expired.pages) == (None, {}, job.pages)
    with pytest.raises(Gone):
        client.renew(job.lease.id, 1000)


def test_leased_pages_stay_and_the_longest_idle_chain_goes_first_from_its_end(client: Client) -> None:
    first, second = client.prefetch("demo", KEYS[:4]), client.prefetch("demo", OTHERS[:4])
    declined = client.prefetch("demo", KEYS[4:7])
    assert (declined.outcome, declined.shortfall) == ("miss", {"host_capacity": 3})
    for job in (second, first):
        assert job.lease is not None
        client.release(job.lease.id)
    assert client.prefetch("demo", KEYS[4:7]).outcome == "complete"
    assert client.lookup("demo", OTHERS[:4]).pages.host == 1
    assert client.lookup("demo", OTHERS[:4]).pages.stored == 4
    assert client.lookup("demo", KEYS[:4]).pages.host == 4


def test_held_jobs(fake: FakeForestage, client: Client) -> None:
    client.prefetch("demo", KEYS[:2])
    fake.hold()
    job = client.prefetch("demo", KEYS[:8], request_id="r")
    assert (job.state, job.outcome, job.pages.granted, job.pages.ready) == ("loading", None, 8, 2)
    assert (job.lease, job.slots, job.loaded) == (None, {}, 0)
    assert client.get_prefetch("r", wait_ms=5).state == "loading"
    assert client.lookup("demo", OTHERS[:1]).pages.grantable == 0  # its slots are reserved
    waiter = threading.Timer(0.02, fake.resume)
    waiter.start()
    done = client.get_prefetch("r", wait_ms=60_000)
    waiter.join()
    assert (done.outcome, done.loaded, done.pages.ready) == ("complete", 6, 8)
    assert client.prefetch("demo", KEYS[:1]).done


def test_a_finished_job_keeps_what_is_ready(fake: FakeForestage, client: Client) -> None:
    client.prefetch("demo", KEYS[:2])
    fake.hold()
    client.prefetch("demo", KEYS[:6], request_id="r")
    job = client.finish("r")
    assert (job.outcome, job.pages.granted, job.pages.ready) == ("partial", 6, 2)
    assert job.shortfall == {"finished": 4}
    assert len(job.slots["kv"]) == 2
    assert client.finish("r") == job
    assert client.lookup("demo", OTHERS[:6]).pages.grantable == 6


def test_a_cancelled_job_gives_all_back(fake: FakeForestage, client: Client) -> None:
    fake.hold()
    client.prefetch("demo", KEYS[:8], request_id="r")
    client.cancel("r")
    assert fake.num_leases == 0
    assert client.lookup("demo", OTHERS[:8]).pages.grantable == 8
    for ask in (client.get_prefetch, client.finish):
        with pytest.raises(NotFound, match="no job r"):
            ask("r")


def test_full_queues_and_used_ids_are_refused(fake: FakeForestage, client: Client) -> None:
    fake.hold()
    client.prefetch("demo", KEYS[:1], request_id="a")
    client.prefetch("demo", KEYS[:2], request_id="b")
    with pytest.raises(QueueFull) as refused:
        client.prefetch("demo", KEYS[:3], request_id="c")
    assert (refused.value.status, refused.value.slug, refused.value.retry_after_s) == (429, "queue-full", 1)
    assert client.prefetch("demo", [KEYS[0].hex()], request_id="a", wait_ms=1).state == "loading"
    with pytest.raises(Conflict):
        client.prefetch("demo", KEYS[:1], request_id="a", lease_ms=7)
    fake.resume()
    assert client.prefetch("demo", KEYS[:3], request_id="c").done


@pytest.mark.parametrize(
    ("keys", "options", "complaint"),
    [
        ([KEYS[0], KEYS[0]], {}, "distinct"),
        ([KEYS[0].hex(), KEYS[0].hex().upper()], {}, "distinct"),
        ([b"short"], {}, "16 to 64 bytes"),
        ([bytes(65)], {}, "16 to 64 bytes"),
        (KEYS[:1], {"device_pages": 2}, "device_pages"),
        (KEYS[:1], {"request_id": "a b"}, "request_id"),
        (KEYS[:1], {"request_id": ""}, "request_id"),
        (KEYS[:1], {"min_pages": -1}, "min_pages"),
        (KEYS[:1], {"lease_ms": "soon"}, "lease_ms"),
    ],
)
def test_bad_requests_are_422(client: Client, keys: list[Any], options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadRequest, match=complaint) as refused:
        client.prefetch("demo", keys, **options)
    assert refused.value.status == 422


def test_a_bad_wait_is_422(client: Client) -> None:
    client.prefetch("demo", KEYS[:1], request_id="r")
    with pytest.raises(BadRequest, match="wait_ms"):
        client.get_prefetch("r", wait_ms=-1)


def test_json_keys_that_are_no_hex_are_422(fake: FakeForestage) -> None:
    with fake.client(encoding="json") as client, pytest.raises(BadRequest) as refused:
        client.prefetch("demo", ["zz" * 16])
    assert refused.value.status == 422


def test_no_keys_are_complete(client: Client) -> None:
    assert client.prefetch("demo", []).outcome == "complete"
    assert client.prefetch("demo", KEYS[:3], device_pages=3).outcome == "complete"


def test_the_guide_fakes_a_service() -> None:
    assert run_example("FakeForestage(")["fake"].num_leases == 0


def test_states_that_cannot_be_are_refused_in_the_test_itself() -> None:
    fake = FakeForestage([HYBRID])
    for states in ({"mamba": [0]}, {"mamba": [21]}, {"kv": [3]}, {"lost": [3]}):
        with pytest.raises(ValueError, match="tail component"):
            fake.store("demo", KEYS, states)


requests = st.fixed_dictionaries(
    {
        "chain": st.sampled_from(["trunk", "branch"]),
        "pages": st.integers(0, 20),
        "device": st.integers(0, 20),
        "min_pages": st.integers(0, 6),
        "then": st.sampled_from(["keep", "release", "cancel", "hold", "finish", "lease", "resume"]),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(requests, max_size=12), st.integers(1, 24), st.integers(1, 3), st.sets(st.integers(1, 20)))
def test_the_laws_hold_whatever_is_asked(
    asked: list[dict[str, Any]], kv_slots: int, state_slots: int, states: set[int]
) -> None:
    components = (Component("kv", 8, slots=kv_slots), Component("mamba", 8, "tail", window=2, slots=state_slots))
    service = FakeService([Model("m", 16, components)], 0, 3, 30_000)
    pool = service.pools["m"]
    chains = {"trunk": KEYS, "branch": KEYS[:8] + OTHERS[8:]}
    for keys in chains.values():
        pool.store(keys[:18], {"mamba": sorted(length for length in states if length <= 18)})

    for number, ask in enumerate(asked):
        keys = chains[ask["chain"]][: ask["pages"]]
        prefix = {"model": "m", "keys": keys, "device_pages": min(ask["device"], len(keys))}
        service.holding = ask["then"] == "hold"
        before = service.handle("POST", ["v1", "lookup"], {}, prefix).value
        try:
            job = service.handle("POST", ["v1", "prefetch"], {}, {**prefix, "min_pages": ask["min_pages"]}).job
        except QueueFull:
            service.resume()
            continue
        assert job is not None
        answer: dict[str, Any] = service.describe(job)
        pages = answer["pages"]
        device = prefix["device_pages"]
        assert device <= pages["host"] <= pages["stored"] <= pages["requested"] == len(keys)
        assert device <= pages["ready"] <= pages["granted"] <= pages["restorable"] <= pages["stored"]
        assert isinstance(before, dict)
        assert pages["granted"] == before["pages"]["grantable"]
        if job.done:
            assert sum(answer["shortfall"].values()) == pages["requested"] - pages["ready"]
            assert ("slots" in answer) == ("lease" in answer) == (pages["ready"] > device)
        if "slots" in answer:
            assert len(answer["slots"]["kv"]) == pages["ready"] - device
            assert len(answer["slots"]["mamba"]) == min(2, pages["ready"] - device)
            for shelf in pool.shelves:
                name, end = shelf.component.name, pages["ready"]
                held = keys[end - len(answer["slots"][name]) : end]
                assert [shelf.resident[key] for key in held] == answer["slots"][name]
        if ask["then"] == "release" and job.lease is not None:
            service.handle("DELETE", ["v1", "leases", job.lease.id], {}, {})
        elif ask["then"] == "cancel":
            service.handle("DELETE", ["v1", "prefetch", job.request_id], {}, {})
        elif ask["then"] == "finish":
            service.handle("POST", ["v1", "prefetch", job.request_id, "finish"], {}, {})
        elif ask["then"] == "lease":
            service.handle("POST", ["v1", "leases"], {}, prefix)
        elif ask["then"] == "resume":
            service.resume()
        check_slots(service, f"after request {number}")

    service.resume()
    service.now_s = 31.0
    service.expire()
    check_slots(service, "at the end")
    assert all(len(shelf.idle) == len(shelf.resident) for shelf in pool.shelves)


def check_slots(service: FakeService, when: str) -> None:
    for shelf in service.pools["m"].shelves:
        reserved = [
            slot for job in service.jobs if not job.done for other, _, slot in job.grant.reserved if other is shelf
        ]
        slots = [*shelf.free, *shelf.resident.values(), *reserved]
        assert sorted(slots) == list(range(shelf.slots)), when
        assert set(shelf.idle) == {key for key in shelf.resident if key not in shelf.holds}, when


# ---- writes


def test_what_is_committed_is_resident_and_durable() -> None:
    fake = FakeForestage([HYBRID], pool_pages=8)
    fake.store("demo", KEYS[:2], {"mamba": [2]})
    with fake.client() as client:
        write = client.begin_write("demo", KEYS[:6], {"mamba": [5, 1]})
        assert (write.stored, write.granted, write.reason) == ((0, 1), 6, None)
        assert write.slots["kv"][:2] == (None, None)
        assert len(set(write.slots["kv"][2:])) == 4
        assert write.slots["mamba"][0] is not None
        assert write.slots["mamba"][1] is None
        assert fake.num_writes == 1
        assert client.lookup("demo", KEYS[:6]).pages.stored == 2
        assert client.commit_write(write.id) == WriteStatus(committed=4, durable=4, failed=0)
        assert client.commit_write(write.id) == client.write_status(write.id, wait_ms=10)
        assert client.write_status(write.id).settled
        assert fake.num_writes == 0
        pages = client.lookup("demo", KEYS[:6]).pages
        assert (pages.host, pages.stored, pages.restorable) == (0, 6, 6)
        client.drop_write(write.id)
        with pytest.raises(NotFound) as raised:
            client.write_status(write.id)
        assert raised.value.slug == "unknown-write"
        job = client.prefetch("demo", KEYS[:6])
        assert (job.outcome, job.loaded, job.slots["kv"][2:]) == ("complete", 2, write.slots["kv"][2:])


def test_a_write_gets_what_there_is_room_for_and_gives_it_back() -> None:
    fake = FakeForestage([HYBRID], pool_pages=4)
    with fake.client() as client:
        first = client.begin_write("demo", KEYS[:3])
        second = client.begin_write("demo", KEYS[:3])
        assert (first.granted, second.granted, second.reason) == (3, 1, "host_capacity")
        client.commit_write(first.id)
        # The one page of the second has become resident meanwhile.
        assert client.commit_write(second.id) == WriteStatus(committed=0, durable=0, failed=0, duplicate=1)
        third = client.begin_write("demo", OTHERS[:4])
        assert third.granted == 4  # what is idle makes room
        client.drop_write(third.id)
        client.drop_write(third.id)
        assert client.begin_write("demo", OTHERS[:4], {"mamba": [1, 2, 3]}).granted == 3  # two states have room
        assert fake.num_writes == 1


def test_a_write_that_is_not_committed_expires() -> None:
    fake = FakeForestage([HYBRID], pool_pages=4)
    with fake.client() as client:
        write = client.begin_write("demo", KEYS[:4])
        fake.now_s = write.expires_in_ms / 1000
        assert fake.num_writes == 0
        for call in (client.commit_write, client.write_status):
            with pytest.raises(Gone) as raised:
                call(write.id)
            assert raised.value.slug == "write-gone"
        assert client.begin_write("demo", OTHERS[:4]).granted == 4


@pytest.mark.parametrize("tails", [{"kv": [0]}, {"other": [0]}, {"mamba": [3]}, {"mamba": [1, 1]}])
def test_tails_that_make_no_sense_are_refused(tails: dict[str, list[int]]) -> None:
    with FakeForestage([HYBRID]).client() as client, pytest.raises(BadRequest, match="tails"):
        client.begin_write("demo", KEYS[:3], tails)


def test_pins_keep_pages_and_evict_lets_them_go_first() -> None:
    fake = FakeForestage(pool_pages=6)
    a, b, c = ([bytes([first + page]) * 32 for page in range(3)] for first in (0, 100, 200))
    for keys in (a, b, c):
        fake.store("demo", keys)
    with fake.client() as client:
        for keys in (a, b):
            client.cancel(client.prefetch("demo", keys).request_id)
        pin = client.pin("demo", a, ttl_ms=5000)
        client.cancel(client.prefetch("demo", c).request_id)  # a is older than b, and stays
        assert [client.lookup("demo", keys).pages.host for keys in (a, b, c)] == [3, 0, 3]
        fake.now_s += 5.0
        assert (pin.id is not None, fake.num_pins) == (True, 0)
        assert client.evict("demo", c) == Evicted(evicted=3, kept=0)
        assert client.lookup("demo", c).pages.host == 3
        client.cancel(client.prefetch("demo", b[:1]).request_id)
        assert [client.lookup("demo", keys).pages.host for keys in (a, b, c)] == [3, 1, 2]
