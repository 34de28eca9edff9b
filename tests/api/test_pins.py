"""Pins and evict over HTTP, in JSON and MessagePack."""

from pathlib import Path
from typing import Any

import pytest

from api.wire import Wire
from forestage_client import Gone
from support.live import hybrid, kv_only, live, make_keys, sum_of, until


async def _post(wire: Wire, path: str, keys: list[bytes], **fields: int) -> tuple[int, Any]:
    answer = await wire.ask("POST", path, {"model": "m", "keys": wire.keys(keys), **fields})
    return answer.status, answer.body


async def test_a_pin_keeps_pages_without_slots(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(16)) as service:
        kept, other = make_keys(6, "kept"), make_keys(16, "other")
        service.store([*kept, *other])
        await service.client.cancel((await service.client.prefetch("m", kept, wait_ms=5000)).request_id)
        pinned = await service.client.pin("m", kept, ttl_ms=60_000)
        assert (pinned.pages.ready, pinned.pages.requested) == (6, 6)
        assert pinned.id is not None
        assert 59_000 < pinned.expires_in_ms <= 60_000
        job = await service.client.prefetch("m", other, wait_ms=5000)
        assert (job.pages.ready, job.shortfall) == (10, {"host_capacity": 6})
        await service.client.cancel(job.request_id)
        assert (await service.client.lookup("m", kept)).pages.host == 6
        numbers = await service.scrape()
        assert (sum_of(numbers, "pins"), sum_of(numbers, "leases")) == (1, 0)
        with pytest.raises(Gone):
            await service.client.renew(pinned.id, 1000)
        await service.client.release(pinned.id)  # no lease of this id: nothing happens
        assert len(service.engine.pins) == 1
        for _ in range(2):
            await service.client.unpin(pinned.id)
        assert (await service.client.prefetch("m", other, wait_ms=5000)).pages.ready == 16
        await service.idle()


async def test_pins_end_by_themselves_and_are_bounded(tmp_path: Path) -> None:
    lease = {"max_pin_ms": 40, "max_pinned_fraction": 0.5}
    async with live(tmp_path, kv_only(16), lease=lease) as service:
        keys = make_keys(8)
        service.store(keys)
        await service.client.cancel((await service.client.prefetch("m", keys, wait_ms=5000)).request_id)
        held = await service.client.lease("m", keys[:3])
        pinned = await service.client.pin("m", make_keys(4, "x") + keys, ttl_ms=1)
        assert (pinned.id, pinned.pages.ready) == (None, 0)
        pinned = await service.client.pin("m", keys, ttl_ms=10_000_000)
        assert (pinned.pages.ready, pinned.expires_in_ms <= 40) == (8, True)
        await until(lambda: not len(service.engine.pins))
        assert held.lease is not None
        await service.client.release(held.lease.id)
        await service.idle()


async def test_the_answer_in_full(wire: Wire) -> None:
    keys = make_keys(5)
    wire.service.store(keys[:4])
    nothing = await _post(wire, "/v1/pins", keys, ttl_ms=1000)
    lengths = {"requested": 5, "host": 0, "stored": 0, "restorable": 0, "granted": 0, "ready": 0}
    assert nothing == (
        200,
        {"model": "m", "page_tokens": 16, "pages": lengths, "tokens": {n: 16 * v for n, v in lengths.items()}}
        | {"expires_in_ms": 0},
    )
    job = await wire.service.client.prefetch("m", keys, wait_ms=5000)
    status, pinned = await _post(wire, "/v1/pins", keys, device_pages=1, ttl_ms=1000)
    lengths = {"requested": 5, "host": 4, "stored": 4, "restorable": 4, "granted": 4, "ready": 4}
    assert (status, pinned["pages"], pinned["tokens"]["ready"]) == (201, lengths, 64)
    assert set(pinned) == {"id", "model", "page_tokens", "pages", "tokens", "expires_in_ms"}
    assert await _post(wire, "/v1/evict", keys) == (200, {"model": "m", "evicted": 0, "kept": 4})
    await wire.service.client.cancel(job.request_id)
    assert await _post(wire, "/v1/evict", keys) == (200, {"model": "m", "evicted": 1, "kept": 3})
    await wire.service.client.unpin(pinned["id"])
    await wire.service.idle()


async def test_an_evicted_prefix_goes_first_and_is_found_until_then(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(12)) as service:
        a, b, c = make_keys(6, "a"), make_keys(6, "b"), make_keys(4, "c")
        service.store([*a, *b, *c])
        for keys in (a, b):
            await service.client.cancel((await service.client.prefetch("m", keys, wait_ms=5000)).request_id)
        assert (await service.client.evict("m", b, device_pages=1)).evicted == 5
        assert (await service.client.lookup("m", b)).pages.host == 6
        await service.client.cancel((await service.client.prefetch("m", c, wait_ms=5000)).request_id)
        found = [(await service.client.lookup("m", keys)).pages.host for keys in (a, b, c)]
        assert found == [6, 2, 4]
        await service.idle()


async def test_a_hybrid_prefix_is_pinned_to_a_boundary(tmp_path: Path) -> None:
    async with live(tmp_path, hybrid(16, 4)) as service:
        keys = make_keys(8)
        service.store(keys, [5])
        await service.client.cancel((await service.client.prefetch("m", keys, wait_ms=5000)).request_id)
        pinned = await service.client.pin("m", keys, ttl_ms=1000)
        assert (pinned.pages.host, pinned.pages.restorable, pinned.pages.ready) == (5, 5, 5)
        assert pinned.id is not None
        await service.client.unpin(pinned.id)
        await service.idle()
