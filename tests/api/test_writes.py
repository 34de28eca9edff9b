"""Writes over HTTP, in both encodings: slots, commit, progress, and every way to get it wrong."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import pytest

from api.raw import leave, send_request
from api.wire import Answer, Wire
from forestage.core.errors import StorageUnavailableError
from support.live import Live, hybrid, kv_only, live, make_keys, until
from writes.slow_writes import SlowWrites, fill_answer

KEYS = make_keys(8)


@pytest.fixture
async def storage() -> SlowWrites:
    return SlowWrites()


@pytest.fixture
async def service(tmp_path: Path, storage: SlowWrites) -> AsyncIterator[Live]:
    async with live(tmp_path, hybrid(32, 4), inner=storage, writes={"expire_ms": 60_000}) as running:
        running.memory = storage
        yield running
        storage.release()


@pytest.fixture(params=["json", "msgpack"])
def wire(service: Live, request: pytest.FixtureRequest) -> Wire:
    return Wire(service, cast('Literal["json", "msgpack"]', request.param))


async def _begin(wire: Wire, keys: Sequence[bytes] = KEYS, **fields: Any) -> Answer:
    return await wire.ask("POST", "/v1/writes", {"model": "m", "keys": wire.keys(keys), **fields})


async def _problem(answer: Answer, status: int, slug: str) -> None:
    assert (answer.status, answer.body["type"]) == (status, slug)
    assert answer.headers["content-type"] == "application/problem+json"


async def test_pages_with_their_states_come_to_the_pool_and_to_l3(wire: Wire) -> None:
    service = wire.service
    begun = await _begin(wire, tails={"state": [7, 3]}, tenant="somebody")
    body = begun.body
    assert begun.status == 201
    assert (body["model"], body["stored"], body["granted"], body["reason"]) == ("m", [], 8, None)
    assert [len(set(slots)) for slots in body["slots"].values()] == [8, 2]
    assert 59_000 < body["expires_in_ms"] <= 60_000
    pool = (await wire.ask("GET", "/v1/pool")).body
    assert (body["instance"], body["generation"]) == (pool["instance"], pool["generation"])
    assert (await wire.ask("GET", f"/v1/writes/{body['id']}")).body["committed"] == 0
    fill_answer(service, KEYS, body, [7, 3])
    committed = await wire.ask("POST", f"/v1/writes/{body['id']}/commit")
    assert committed.status == 200
    assert (committed.body["committed"], committed.body["failed"], committed.body["duplicate"]) == (8, 0, 0)
    done = await wire.ask("GET", f"/v1/writes/{body['id']}?wait_ms=10000")
    assert done.body == {"committed": 8, "durable": 8, "failed": 0, "duplicate": 0, "parts_left": 0}
    assert (await wire.ask("POST", f"/v1/writes/{body['id']}/commit")).body == done.body
    job = await wire.prefetch(KEYS, wait_ms=5000)
    assert (job.body["pages"]["host"], job.body["pages"]["ready"], job.body["loaded"]) == (8, 8, 0)
    await service.idle()


async def test_a_page_on_its_way_to_l3_is_had_from_the_pool(wire: Wire, storage: SlowWrites) -> None:
    storage.hold()
    begun = await _begin(wire, tails={"state": [7]})
    fill_answer(wire.service, KEYS, begun.body, [7])
    await wire.ask("POST", f"/v1/writes/{begun.body['id']}/commit")
    job = await wire.prefetch(KEYS, wait_ms=5000)
    assert (job.body["outcome"], job.body["pages"]["ready"], job.body["loaded"]) == ("complete", 8, 0)
    waited = await wire.ask("GET", f"/v1/writes/{begun.body['id']}?wait_ms=50")
    assert waited.body == {"committed": 8, "durable": 0, "failed": 0, "duplicate": 0, "parts_left": 0}
    samples = await wire.service.scrape()
    assert samples['forestage_pool_slots{component="kv",model="m",state="dirty"}'] == 8
    assert samples['forestage_pool_slots{component="kv",model="m",state="leased"}'] == 0
    storage.release()
    waited = await wire.ask("GET", f"/v1/writes/{begun.body['id']}?wait_ms=10000")
    assert waited.body["durable"] == 8
    samples = await wire.service.scrape()
    assert samples['forestage_pool_slots{component="kv",model="m",state="dirty"}'] == 0
    assert samples['forestage_pool_slots{component="kv",model="m",state="leased"}'] == 8


async def test_what_is_there_already_is_said_and_gets_no_slot(wire: Wire) -> None:
    service = wire.service
    service.store(KEYS[:3], states=[3])
    service.store(KEYS[5:6])  # behind a gap
    body = (await _begin(wire, tails={"state": [2, 6]})).body
    assert body["stored"] == [0, 1, 2, 5]
    assert [slot is None for slot in body["slots"]["kv"]] == [True, True, True, False, False, True, False, False]
    assert [slot is None for slot in body["slots"]["state"]] == [True, False]
    again = (await _begin(wire, KEYS[:3])).body
    assert (again["stored"], again["granted"], again["slots"]) == ([0, 1, 2], 3, {"kv": [None] * 3, "state": []})


async def test_nothing_counts_as_stored_while_l3_cannot_be_asked(wire: Wire) -> None:
    wire.service.store(KEYS)
    wire.service.storage.refuse_probes = True
    body = (await _begin(wire)).body
    assert (body["stored"], body["granted"]) == ([], 8)


async def test_fewer_slots_and_a_reason_instead_of_a_hang(wire: Wire, storage: SlowWrites) -> None:
    storage.hold()
    many = make_keys(40, "many")
    first = (await _begin(wire, many)).body
    assert (first["granted"], first["reason"]) == (16, "back_pressure")  # half of the slots may be dirty
    assert first["slots"]["kv"][16:] == [None] * 24
    second = (await _begin(wire)).body
    assert (second["granted"], second["reason"], second["slots"]["kv"]) == (0, "back_pressure", [None] * 8)
    fill_answer(wire.service, many, first)
    await wire.ask("POST", f"/v1/writes/{first['id']}/commit")
    assert (await _begin(wire)).body["granted"] == 0
    storage.release()
    await wire.ask("GET", f"/v1/writes/{first['id']}?wait_ms=10000")
    assert (await _begin(wire)).body["granted"] == 8


async def test_leased_pages_leave_less_room(wire: Wire) -> None:
    service = wire.service
    leased = make_keys(28, "leased")
    service.store(leased, states=[28])
    await service.client.prefetch("m", leased, wait_ms=10_000)
    body = (await _begin(wire)).body
    assert (body["granted"], body["reason"]) == (4, "host_capacity")


async def test_states_may_be_what_does_not_fit(wire: Wire) -> None:
    body = (await _begin(wire, tails={"state": [1, 3, 5]})).body
    assert (body["granted"], body["reason"]) == (5, "back_pressure")
    assert [slot is None for slot in body["slots"]["state"]] == [False, False, True]


async def test_dropping_is_idempotent(wire: Wire) -> None:
    begun = await _begin(wire)
    for _ in range(2):
        assert (await wire.ask("DELETE", f"/v1/writes/{begun.body['id']}")).status == 204
    await _problem(await wire.ask("POST", f"/v1/writes/{begun.body['id']}/commit"), 404, "unknown-write")
    await _problem(await wire.ask("GET", f"/v1/writes/{begun.body['id']}"), 404, "unknown-write")
    await wire.service.idle()


async def test_duplicates_are_counted(wire: Wire) -> None:
    first, second = await _begin(wire), await _begin(wire, KEYS[:5])
    for begun in (first, second):
        fill_answer(wire.service, KEYS[: len(begun.body["slots"]["kv"])], begun.body)
    await wire.ask("POST", f"/v1/writes/{second.body['id']}/commit")
    committed = await wire.ask("POST", f"/v1/writes/{first.body['id']}/commit")
    assert (committed.body["committed"], committed.body["duplicate"]) == (3, 5)


async def test_pages_that_l3_never_took_are_said_to_have_failed(tmp_path: Path) -> None:
    storage = SlowWrites()
    storage.error = StorageUnavailableError("told to")
    async with live(tmp_path, kv_only(16), inner=storage, writes={"max_attempts": 1}) as service:
        wire = Wire(service, "json")
        begun = await _begin(wire)
        fill_answer(service, KEYS, begun.body)
        await wire.ask("POST", f"/v1/writes/{begun.body['id']}/commit")
        done = await wire.ask("GET", f"/v1/writes/{begun.body['id']}?wait_ms=10000")
        assert done.body == {"committed": 8, "durable": 0, "failed": 8, "duplicate": 0, "parts_left": 0}
        samples = await service.scrape()
        assert samples['forestage_writes_pages_total{result="lost"}'] == 8
        assert samples['forestage_storage_errors_total{backend="memory",kind="write"}'] == 8


async def test_an_expired_write_is_gone_and_its_slots_stay_a_little_longer(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(16), writes={"expire_ms": 150, "keep_done_ms": 60_000}) as service:
        wire = Wire(service, "json")
        begun = await _begin(wire)
        waiting = asyncio.create_task(wire.ask("GET", f"/v1/writes/{begun.body['id']}?wait_ms=20000"))
        await _problem(await waiting, 410, "write-gone")
        await _problem(await wire.ask("POST", f"/v1/writes/{begun.body['id']}/commit"), 410, "write-gone")
        assert service.engine.pools["m"].slots[0].filling == 8
        assert (await wire.ask("DELETE", f"/v1/writes/{begun.body['id']}")).status == 204
        assert service.engine.pools["m"].slots[0].filling == 0
        await _problem(await wire.ask("POST", f"/v1/writes/{begun.body['id']}/commit"), 404, "unknown-write")


async def test_a_settled_write_is_forgotten_after_a_while(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(16), writes={"keep_done_ms": 0}) as service:
        wire = Wire(service, "json")
        begun = await _begin(wire)
        fill_answer(service, KEYS, begun.body)
        await wire.ask("POST", f"/v1/writes/{begun.body['id']}/commit")
        await until(lambda: not service.engine.writes._by_id)
        await _problem(await wire.ask("GET", f"/v1/writes/{begun.body['id']}"), 404, "unknown-write")


async def test_a_part_of_the_pool_is_kept_for_writes(tmp_path: Path) -> None:
    pool = {"path": str(tmp_path / "pool"), "bytes": "64MiB", "pin": "none", "write_reserve": 0.25}
    async with live(tmp_path, kv_only(16), pool=pool) as service:
        wire, many = Wire(service, "json"), make_keys(16, "many")
        service.store(many)
        job = await wire.prefetch(many, wait_ms=10_000)
        assert (job.body["pages"]["granted"], job.body["shortfall"]) == (12, {"host_capacity": 4})
        begun = await _begin(wire)
        assert (begun.body["granted"], begun.body["reason"]) == (4, "host_capacity")


@pytest.mark.parametrize(
    "tails",
    [{"kv": [1]}, {"nobody": [1]}, {"state": [8]}, {"state": [-1]}, {"state": [1, 1]}, {"state": 1}, {"state": [True]}],
)
async def test_wrong_tails(wire: Wire, tails: dict[str, Any]) -> None:
    await _problem(await _begin(wire, tails=tails), 422, "invalid-request")
    assert not list(wire.service.engine.writes)


async def test_wrong_bodies(wire: Wire) -> None:
    await _problem(await _begin(wire, device_pages=1), 422, "invalid-request")
    await _problem(await _begin(wire, [KEYS[0], KEYS[0]]), 422, "duplicate-key")
    unknown = {"model": "other", "keys": wire.keys(KEYS)}
    await _problem(await wire.ask("POST", "/v1/writes", unknown), 404, "unknown-model")
    await _problem(await wire.ask("POST", "/v1/writes/nobody/commit"), 404, "unknown-write")
    await _problem(await wire.ask("GET", "/v1/writes/nobody"), 404, "unknown-write")


@pytest.mark.parametrize(
    "fields",
    [
        {"parts": 2},
        {"request_id": "r"},
        {"request_id": "r", "parts": 2, "part": 2},
        {"request_id": "r r", "parts": 2},
        {"request_id": "r", "parts": 0},
        {"request_id": "r", "parts": 5000},
        {"request_id": "r", "parts": 2, "part": -1},
        {"part": 1},
    ],
)
async def test_wrong_parts(wire: Wire, fields: dict[str, Any]) -> None:
    await _problem(await _begin(wire, **fields), 422, "invalid-request")
    assert not list(wire.service.engine.writes)


async def test_several_callers_fill_a_write_together(wire: Wire) -> None:
    service = wire.service
    together: dict[str, Any] = {"request_id": "r", "parts": 3, "tails": {"state": [7]}}
    # Whoever comes first begins it, also while L3 is asked for all of them.
    begun = await asyncio.gather(*(_begin(wire, **together, part=part) for part in range(3)))
    ids = [answer.body["id"] for answer in begun]
    assert [answer.status for answer in begun] == [201] * 3
    assert len(set(ids)) == 3
    assert [answer.body["slots"] for answer in begun] == [begun[0].body["slots"]] * 3
    await _problem(await _begin(wire, **together, part=1), 409, "part-taken")
    await _problem(await _begin(wire, KEYS[:4], request_id="r", parts=3, part=1), 409, "request-id-conflict")
    whole = ids[0].partition(".")[0]
    for wrong in (whole, f"{whole}.3", f"{whole}.", f"{whole}.x"):
        await _problem(await wire.ask("POST", f"/v1/writes/{wrong}/commit"), 404, "unknown-write")
    fill_answer(service, KEYS, begun[0].body, [7])
    for part, left in ((2, 2), (2, 2), (0, 1)):
        committed = await wire.ask("POST", f"/v1/writes/{ids[part]}/commit")
        assert (committed.body["committed"], committed.body["parts_left"]) == (0, left)
    assert (await wire.prefetch(KEYS, wait_ms=5000)).body["pages"]["ready"] == 0
    committed = await wire.ask("POST", f"/v1/writes/{ids[1]}/commit")
    assert (committed.body["committed"], committed.body["parts_left"]) == (8, 0)
    for write_id in ids:
        done = await wire.ask("GET", f"/v1/writes/{write_id}?wait_ms=10000")
        assert (done.body["committed"], done.body["durable"]) == (8, 8)
    job = await wire.prefetch(KEYS, wait_ms=5000)
    assert (job.body["pages"]["ready"], job.body["loaded"]) == (8, 0)
    # What is there already has no parts to wait for.
    again = await _begin(wire, **together, part=1)
    assert again.body["stored"] == list(range(8))
    assert (await wire.ask("POST", f"/v1/writes/{again.body['id']}/commit")).body["parts_left"] == 0
    await service.idle()


async def test_a_write_of_nothing(wire: Wire) -> None:
    begun = await _begin(wire, [])
    assert (begun.status, begun.body["granted"], begun.body["slots"]) == (201, 0, {"kv": [], "state": []})
    committed = await wire.ask("POST", f"/v1/writes/{begun.body['id']}/commit")
    assert committed.body == {"committed": 0, "durable": 0, "failed": 0, "duplicate": 0, "parts_left": 0}


async def test_a_client_that_leaves_while_it_waits_changes_nothing(service: Live, storage: SlowWrites) -> None:
    wire = Wire(service, "json")
    storage.hold()
    begun = await _begin(wire)
    fill_answer(service, KEYS, begun.body)
    await wire.ask("POST", f"/v1/writes/{begun.body['id']}/commit")
    path = f"/v1/writes/{begun.body['id']}?wait_ms=60000"
    sock = await asyncio.to_thread(send_request, ("127.0.0.1", service.port), "GET", path, None)
    await until(lambda: len(service.parts.service._writers) == 1)
    leave(sock, "fin")
    await until(lambda: not service.asked)
    storage.release()
    done = await wire.ask("GET", path)
    assert done.body["durable"] == 8


async def test_no_write_begins_once_the_service_stops(wire: Wire, storage: SlowWrites) -> None:
    service = wire.service
    begun = await _begin(wire)
    storage.hold()
    fill_answer(service, KEYS, begun.body)
    await wire.ask("POST", f"/v1/writes/{begun.body['id']}/commit")
    stopping = asyncio.create_task(service.parts.service.stop(20))
    await until(lambda: service.engine.stopping)
    await _problem(await _begin(wire, make_keys(4, "late")), 503, "stopping")
    waiting = asyncio.create_task(wire.ask("GET", f"/v1/writes/{begun.body['id']}?wait_ms=30000"))
    await until(lambda: service.asked > 0)
    storage.release()
    assert await stopping
    assert (await waiting).body["durable"] == 8
