"""Envelopes of hints over HTTP, in JSON and MessagePack."""

import asyncio
from pathlib import Path
from typing import Any

import httpx2

from api.wire import Answer, Wire
from support.live import Live, hybrid, kv_only, live, make_keys, until


def _action(action_type: str, action_id: str = "", version: str = "1.0", **payload: Any) -> dict[str, Any]:
    named = {"action_id": action_id or action_type, "action_type": action_type, "action_version": version}
    return {**named, "payload": payload}


def _envelope(*actions: dict[str, Any], message_id: str = "") -> dict[str, Any]:
    return {"protocol_version": "1.0", "message_id": message_id, "actions": list(actions)}


async def _hint(wire: Wire, *actions: dict[str, Any], message_id: str = "", wait_ms: int = 5000) -> Answer:
    body = _envelope(*actions, message_id=message_id)
    return await wire.ask("POST", f"/v1/hints?wait_ms={wait_ms}", body)


def _verdicts(answer: Answer) -> list[tuple[str, str | None]]:
    assert answer.status == 200, answer.body
    return [(action["outcome"], action["reason"]) for action in answer.body["actions"]]


async def test_every_action_in_full(wire: Wire) -> None:
    service, keys = wire.service, make_keys(6)
    service.store(keys[:4])
    named: dict[str, Any] = {"model": "m", "keys": wire.keys(keys)}
    brought = await _hint(wire, _action("prefetch", **named), message_id="one")
    (prefetch,) = brought.body["actions"]
    assert (brought.body["protocol_version"], brought.body["message_id"]) == ("1.0", "one")
    assert prefetch == {
        "action_id": "prefetch",
        "action_type": "prefetch",
        "outcome": "missing",
        "reason": "not_stored",
        "request_id": prefetch["request_id"],
        "state": "done",
        "shortfall": {"not_stored": 2},
        "pages": {"requested": 6, "host": 0, "stored": 4, "restorable": 4, "granted": 4, "ready": 4},
    }
    assert (await service.client.get_prefetch(prefetch["request_id"])).pages.ready == 4
    assert service.engine.jobs[prefetch["request_id"]].request.priority == -1

    retained = await _hint(wire, _action("retain", **named, ttl_ms=60_000), _action("demote", **named))
    retain, demote = retained.body["actions"]
    assert 59_000 < retain.pop("expires_in_ms") <= 60_000
    lengths = {"requested": 6, "host": 4, "stored": 4, "restorable": 4, "granted": 4, "ready": 4}
    pin_id = retain.pop("pin_id")
    assert retain["pages"] == lengths
    assert demote == {
        "action_id": "demote",
        "action_type": "demote",
        "outcome": "clipped",
        "reason": "held",
        "demoted": 0,
        "kept": 4,
    }
    assert _verdicts(retained) == [("missing", "not_resident"), ("clipped", "held")]

    release = _action("release", pin_id=pin_id, request_id=prefetch["request_id"])
    assert _verdicts(await _hint(wire, release)) == [("accepted", None)]
    assert (service.taken, len(service.engine.pins), service.engine.jobs) == (0, 0, {})
    assert _verdicts(await _hint(wire, release)) == [("missing", "unknown")]
    assert _verdicts(await _hint(wire, _action("demote", **named))) == [("accepted", None)]
    await service.idle()


async def test_a_router_names_what_it_expects(wire: Wire) -> None:
    service, keys = wire.service, make_keys(6)
    service.store(keys[:4])
    named: dict[str, Any] = {"model": "m", "keys": wire.keys(keys), "ttl_ms": 60_000}
    answer = await _hint(wire, _action("prefetch", model="m", keys=wire.keys(keys[:4])), message_id="one")
    (prefetch,) = answer.body["actions"]
    assert prefetch["outcome"] == "accepted"
    first, second = [(await _hint(wire, _action("expect", **named))).body["actions"][0] for _ in range(2)]
    assert (first["outcome"], first["reason"], first["marked"]) == ("missing", "not_resident", 4)
    assert 59_000 < first["expires_in_ms"] <= 60_000
    whole = {**named, "keys": wire.keys(keys[:4])}
    assert _verdicts(await _hint(wire, _action("expect", **whole))) == [("accepted", None)]
    assert _verdicts(await _hint(wire, _action("expect", **whole, device_pages=4))) == [("accepted", None)]
    assert (len(service.engine.expectations), service.engine.pools["m"].wants.marked) == (3, 4)
    again = await service.client.prefetch("m", keys, wait_ms=5000)
    assert again.pages.host == 4
    assert {each.id for each in service.engine.expectations} == {second["expect_id"]}
    release = _action("release", expect_id=second["expect_id"])
    assert _verdicts(await _hint(wire, release)) == [("accepted", None)]
    assert _verdicts(await _hint(wire, release)) == [("missing", "unknown")]
    await service.client.cancel(again.request_id)
    await service.client.cancel(prefetch["request_id"])
    await service.idle()


async def test_cuts_and_refusals(tmp_path: Path) -> None:
    async with live(tmp_path, hybrid(8, 4)) as service:
        wire = Wire(service, "json")
        keys = make_keys(12)
        service.store(keys, states=[6, 10])
        named: dict[str, Any] = {"model": "m", "keys": wire.keys(keys)}
        clipped = await _hint(wire, _action("prefetch", **named))
        assert _verdicts(clipped) == [("clipped", "host_capacity")]
        assert clipped.body["actions"][0]["shortfall"] == {"no_boundary": 2, "host_capacity": 4}
        small: dict[str, Any] = {"model": "m", "keys": wire.keys(keys[:8])}
        assert _verdicts(await _hint(wire, _action("pin", **small, ttl_ms=1000))) == [("missing", "not_resident")]
        other = make_keys(7, "other")
        service.store(other, states=[7])
        refused = await _hint(wire, _action("prefetch", model="m", keys=wire.keys(other), min_pages=5))
        assert _verdicts(refused) == [("clipped", "host_capacity")]
        service.store(make_keys(2, "short"), states=[2])
        declined = _action("prefetch", model="m", keys=wire.keys(make_keys(2, "short")), min_pages=3)
        assert _verdicts(await _hint(wire, declined)) == [("rejected", "below_min_pages")]
        for pin in list(service.engine.pins):
            await service.client.unpin(pin.id)
        await service.idle()


async def test_one_wrong_action_stops_no_other(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(16), prefetch={"max_pages": 8, "queue_limit": 0}) as service:
        wire = Wire(service, "json")
        keys = wire.keys(make_keys(4))
        service.store(make_keys(4))
        answer = await _hint(
            wire,
            _action("kv.fetch", model="m", keys=keys),
            _action("prefetch", "version", version="2.0", model="m", keys=keys),
            _action("prefetch", "model", model="other", keys=keys),
            _action("prefetch", "field", model="m", keys=keys, wait_ms=5),
            _action("pin", "ttl", model="m", keys=keys),
            _action("prefetch", "twice", model="m", keys=[*keys, *keys]),
            _action("release", "nothing"),
            _action("prefetch", "tokens", model="m", token_ids=[1, 2, 3]),
            _action("prefetch", "good", model="m", keys=keys),
            _action("demote", "many", model="m", keys=wire.keys(make_keys(8, "b"))),
        )
        assert _verdicts(answer) == [
            ("rejected", "unknown-action"),
            ("rejected", "unknown-version"),
            ("rejected", "unknown-model"),
            ("rejected", "invalid-request"),
            ("rejected", "invalid-request"),
            ("rejected", "duplicate-key"),
            ("rejected", "invalid-request"),
            ("rejected", "no-hash-scheme"),
            ("accepted", None),
            ("rejected", "too-large"),
        ]
        assert all(action["detail"] for action in answer.body["actions"] if action["outcome"] == "rejected")
        assert not any(key in str(answer.body) for key in keys)
        await service.idle()


async def test_bad_envelopes(service: Live) -> None:
    pin = _action("pin")
    bad: list[dict[str, Any]] = [
        {},
        {"protocol_version": "2.0", "message_id": "", "actions": []},
        _envelope(pin, pin),
        _envelope(*(_action("pin", str(number)) for number in range(65))),
        {**_envelope(pin), "more": 1},
        _envelope({**pin, "action_id": ""}),
        _envelope({**pin, "payload": []}),
        _envelope(pin, message_id="x" * 129),
    ]
    for body in bad:
        answer = await service.http.post("/v1/hints", json=body)
        assert (answer.status_code, answer.json()["type"]) == (422, "invalid-request"), body
    assert (await service.http.post("/v1/hints", json=_envelope())).json()["actions"] == []


async def test_deferred_then_done_and_sent_again(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(16), prefetch={"max_inflight_fraction": 0.5}) as service:
        wire = Wire(service, "json")
        chains = [make_keys(8, name) for name in "ab"]
        for keys in chains:
            service.store(keys)
        service.storage.hang_probes()
        actions = [_action("prefetch", str(i), model="m", keys=wire.keys(keys)) for i, keys in enumerate(chains)]
        first = await _hint(wire, *actions, message_id="turn", wait_ms=0)
        assert _verdicts(first) == [("accepted", None), ("deferred", "queued")]
        again = asyncio.create_task(_hint(wire, *actions, message_id="turn", wait_ms=10_000))
        await until(lambda: service.asked == 1)
        service.storage.release()
        done = await again
        assert _verdicts(done) == [("accepted", None), ("accepted", None)]
        ids = [[action["request_id"] for action in answer.body["actions"]] for answer in (first, done)]
        assert ids[0] == ids[1]
        assert sorted(service.engine.jobs) == sorted(ids[0])
        other = await _hint(wire, actions[0], message_id="turn")
        assert (other.status, other.body["type"]) == (409, "message-id-conflict")
        await service.idle()


async def test_a_pin_is_not_doubled_by_sending_it_again(wire: Wire) -> None:
    keys = make_keys(4)
    wire.service.store(keys)
    await wire.service.client.prefetch("m", keys, wait_ms=5000)
    action = _action("pin", model="m", keys=wire.keys(keys), ttl_ms=60_000)
    one, two = await asyncio.gather(*(_hint(wire, action, message_id="pin") for _ in range(2)))
    assert one.body["actions"][0]["pin_id"] == two.body["actions"][0]["pin_id"]
    assert len(wire.service.engine.pins) == 1
    await _hint(wire, action)
    await _hint(wire, action)
    assert len(wire.service.engine.pins) == 3
    for pin in list(wire.service.engine.pins):
        await wire.service.client.unpin(pin.id)
    await wire.service.idle()


async def test_token_ids_and_tenants(tmp_path: Path) -> None:
    hashed = {**kv_only(16), "hash": {"scheme": "sglang"}}
    tenants = [{"name": "a"}, {"name": "b"}]
    tokens = {"a": "token-of-a", "b": "token-of-b"}
    async with live(tmp_path, hashed, token="any", tenant_tokens=tokens, tenants=tenants) as service:
        url = f"http://127.0.0.1:{service.port}"
        asked: dict[str, Any] = {"model": "m", "token_ids": list(range(40)), "include_keys": True}
        for tenant in "ab":
            headers = {"Authorization": f"Bearer {tokens[tenant]}"}
            async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=30) as http:
                actions = [_action("prefetch", "own", **asked), _action("demote", **asked, tenant="a")]
                body = _envelope(*actions, message_id="same")
                answer = (await http.post("/v1/hints?wait_ms=5000", json=body)).json()
                own, demote = answer["actions"]
                assert (own["outcome"], own["pages"]["requested"], len(own["keys"])) == ("missing", 2, 2)
                assert demote["reason"] == ("not_resident" if tenant == "a" else "other-tenant")
                release = _envelope(_action("release", request_id=own["request_id"]))
                if tenant == "a":
                    of_a = own["request_id"]
                else:
                    stolen = _envelope(_action("release", request_id=of_a))
                    assert (await http.post("/v1/hints", json=stolen)).json()["actions"][0]["outcome"] == "missing"
                    assert of_a in service.engine.jobs
                    assert (await http.post("/v1/hints", json=release)).json()["actions"][0]["outcome"] == "accepted"
        assert list(service.engine.jobs) == [of_a]
        await service.idle()
