"""Metrics of hints and of events: each action is counted once, and what a listener hears or misses adds up."""

from pathlib import Path
from typing import Any

from forestage.core.hints import HintOutcome
from forestage.prefetch.feed import Changes, Channel, Snapshot
from support.live import Live, kv_only, live, make_keys, sum_of


def _action(action_type: str, action_id: str = "", **payload: Any) -> dict[str, Any]:
    named = {"action_id": action_id or action_type, "action_type": action_type, "action_version": "1.0"}
    return {**named, "payload": payload}


async def _send(service: Live, message_id: str, *actions: dict[str, Any]) -> None:
    body = {"protocol_version": "1.0", "message_id": message_id, "actions": list(actions)}
    answer = await service.http.post("/v1/hints?wait_ms=10000", json=body)
    assert answer.status_code == 200, answer.text


async def test_hints_are_counted_once_each(service: Live) -> None:
    keys = [key.hex() for key in make_keys(4)]
    service.store(make_keys(3))
    before = await service.scrape()
    assert sum_of(before, "hint_actions_total") == 0
    prefetch = _action("prefetch", model="m", keys=keys[:3])
    for _ in range(3):  # carried out once
        await _send(service, "one", prefetch)
    await _send(service, "two", _action("prefetch", model="m", keys=keys), _action("pin", model="m", keys=keys))
    await _send(service, "", _action("retain", model="m", keys=keys[:3], ttl_ms=1000), _action("kv.fetch"))
    await _send(service, "", _action("demote", model="m", keys=keys[:3]), _action("release", pin_id="nothing"))
    after = await service.scrape()
    assert set(after) == set(before)
    counted = {
        (kind, outcome.value): sum_of(after, "hint_actions_total", f'action="{kind}"', f'outcome="{outcome.value}"')
        for kind in ("prefetch", "pin", "retain", "release", "demote", "unknown")
        for outcome in HintOutcome
    }
    assert {pair: number for pair, number in counted.items() if number} == {
        ("prefetch", "accepted"): 1,
        ("prefetch", "missing"): 1,
        ("pin", "rejected"): 1,
        ("retain", "accepted"): 1,
        ("unknown", "rejected"): 1,
        ("demote", "clipped"): 1,
        ("release", "missing"): 1,
    }


async def test_events_told_and_missed_add_up(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(64), events={"buffer": 10}) as service:
        feed = service.parts.service.residency
        log = feed.log
        steps = feed.follow(None, 10)
        assert isinstance(await anext(steps), Snapshot)
        listening = await service.scrape()
        assert sum_of(listening, "event_listeners", 'channel="http"') == 1
        begun, told = log.next, 0
        for name, pages in (("a", 5), ("b", 30), ("c", 3)):
            keys = make_keys(pages, name)
            service.store(keys)
            await service.client.prefetch("m", keys, wait_ms=10_000)
            while log.next > begun + told + feed.lost[Channel.HTTP]:
                step = await anext(steps)
                told += len(step.events) if isinstance(step, Changes) else 0
        await steps.aclose()
        samples = await service.scrape()
        assert sum_of(samples, "events_published_total", 'channel="http"') == told > 0
        lost = sum_of(samples, "events_dropped_total", 'channel="http"')
        assert lost > 0
        assert told + lost == log.next - 1 - begun  # the end of listening takes a number
        assert sum_of(samples, "events_published_total", 'channel="zmq"') == 0
        assert sum_of(samples, "event_listeners") == 0
