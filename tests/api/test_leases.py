"""Leases over HTTP: renewed, released, expired; consumers that come too late (FAULTS S12)."""

import asyncio
from pathlib import Path

import pytest

from api.wire import Wire
from forestage_client import Gone
from forestage_client.pool_view import PoolView, Stale
from support.live import Live, content, hybrid, kv_only, live, make_keys, sum_of, until


@pytest.mark.parametrize("pages", [1, 64])
async def test_a_late_reader_without_pressure(service: Live, pages: int) -> None:
    keys = make_keys(pages)
    service.store(keys)
    await service.client.prefetch("m", keys, request_id="a", lease_ms=100, wait_ms=5000)
    job = await service.client.get_prefetch("a")
    await until(lambda: len(service.engine.leases) == 0)
    # the pages are still there: whole bytes of their keys
    with PoolView(service.parts.pool.path) as view:
        for key, slot in zip(keys, job.slots["kv"], strict=True):
            assert view.copy("m", "kv", slot, key) == content(key, "kv")
    expired = await service.client.get_prefetch("a")
    assert (expired.state, expired.pages, expired.lease, dict(expired.slots)) == ("done", job.pages, None, {})
    assert sum_of(await service.scrape(), "lease_expired_total") == 1
    await service.idle()


@pytest.mark.parametrize("pages", [1, 64])
async def test_a_late_reader_whose_slots_are_taken(tmp_path: Path, pages: int) -> None:
    async with live(tmp_path, kv_only(pages)) as service:
        a, b = make_keys(pages, "a"), make_keys(pages, "b")
        service.store([*a, *b])
        first = await service.client.prefetch("m", a, request_id="a", lease_ms=50, wait_ms=5000)
        assert first.lease is not None
        await until(lambda: len(service.engine.leases) == 0)
        second = await service.client.prefetch("m", b, request_id="b", wait_ms=5000)
        assert (second.pages.ready, set(second.slots["kv"])) == (pages, set(first.slots["kv"]))
        with PoolView(service.parts.pool.path) as view:
            for key, slot in zip(a, first.slots["kv"], strict=True):
                with pytest.raises(Stale):
                    view.copy("m", "kv", slot, key)
        with pytest.raises(Gone):
            await service.client.renew(first.lease.id, 1000)
        for _ in range(2):
            await service.client.release(first.lease.id)
            await service.client.cancel("a")
        assert service.taken == pages  # b's lease is untouched
        assert sum_of(await service.scrape(), "leases") == 1
        with PoolView(service.parts.pool.path) as view:
            for key, slot in zip(b, second.slots["kv"], strict=True):
                assert view.copy("m", "kv", slot, key) == content(key, "kv")
        await service.client.cancel("b")
        assert (await service.client.prefetch("m", a, wait_ms=5000)).pages.ready == pages
        await service.idle()


async def test_a_renewed_lease_lives_on_and_shows_in_its_job(service: Live) -> None:
    keys = make_keys(4)
    service.store(keys)
    job = await service.client.prefetch("m", keys, request_id="r", lease_ms=300, wait_ms=5000)
    assert job.lease is not None
    renewed = await service.client.renew(job.lease.id, 60_000)
    assert (renewed.id, renewed.expires_in_ms > 50_000) == (job.lease.id, True)
    await asyncio.sleep(0.4)  # past its first end
    again = await service.client.get_prefetch("r")
    assert again.lease is not None
    assert (again.lease.id, again.slots) == (job.lease.id, job.slots)
    assert again.lease.expires_in_ms > 50_000
    # renewing may shorten it too
    await service.client.renew(job.lease.id, 1)
    await until(lambda: len(service.engine.leases) == 0)
    with pytest.raises(Gone):
        await service.client.renew(job.lease.id, 1000)
    await service.idle()


async def test_terms_are_cut_to_the_longest(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(8), lease={"max_ms": 2000, "default_ms": 1500}) as service:
        keys = make_keys(2)
        service.store(keys)
        await service.client.prefetch("m", keys, wait_ms=5000)
        plain = await service.client.lease("m", keys)
        long = await service.client.lease("m", keys, lease_ms=60_000)
        assert plain.lease is not None
        assert long.lease is not None
        assert 1000 < plain.lease.expires_in_ms <= 1500 < long.lease.expires_in_ms <= 2000
        assert (await service.client.renew(plain.lease.id, 60_000)).expires_in_ms <= 2000


async def test_two_leases_on_one_page(service: Live) -> None:
    keys = make_keys(2)
    service.store(keys)
    first = await service.client.prefetch("m", keys, wait_ms=5000)
    second = await service.client.lease("m", keys)
    assert first.lease is not None
    assert second.lease is not None
    assert (first.slots, sum_of(await service.scrape(), "leases")) == (second.slots, 2)
    await service.client.release(first.lease.id)
    assert service.taken == 2
    await service.client.release(second.lease.id)
    assert service.taken == 0


async def test_a_lease_is_on_the_resident_restorable_prefix(tmp_path: Path) -> None:
    async with live(tmp_path, hybrid(16, 2)) as service:
        keys = make_keys(8)
        service.store(keys, states=[5])
        brought = await service.client.prefetch("m", keys, wait_ms=5000)
        assert (brought.pages.stored, brought.pages.ready) == (8, 5)
        probes = service.storage.probes
        leased = await service.client.lease("m", keys)
        assert (leased.pages.host, leased.pages.ready, leased.slots) == (5, 5, brought.slots)
        none = await service.client.lease("m", keys[:4])  # resident, but no state there
        assert (none.pages.host, none.pages.ready, none.lease, dict(none.slots)) == (4, 0, None, {})
        on_device = await service.client.lease("m", keys[:5], device_pages=5)
        assert (on_device.pages.ready, on_device.lease) == (5, None)
        assert service.storage.probes == probes
        await service.idle()


async def test_leased_pages_are_not_evicted_and_say_so(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(8)) as service:
        a, b = make_keys(6, "a"), make_keys(10, "b")
        service.store([*a, *b])
        kept = await service.client.prefetch("m", a, wait_ms=5000)
        cut = await service.client.prefetch("m", b, wait_ms=5000, request_id="b")
        assert (cut.pages.stored, cut.pages.granted, dict(cut.shortfall)) == (10, 2, {"host_capacity": 8})
        none = await service.client.prefetch("m", make_keys(3, "a2") + a[:1], wait_ms=5000)
        assert none.outcome == "miss"
        full = await service.client.prefetch("m", b[2:], wait_ms=5000)
        assert (full.outcome, full.pages.stored, dict(full.shortfall)) == ("miss", 8, {"host_capacity": 8})
        assert kept.lease is not None
        await service.client.release(kept.lease.id)
        await service.client.cancel("b")
        assert (await service.client.prefetch("m", b[2:], wait_ms=5000)).outcome == "complete"
        await service.idle()


async def test_a_lookup_changes_nothing(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(4)) as service:
        wire = Wire(service, "json")
        old, young, new = make_keys(2, "old"), make_keys(2, "young"), make_keys(2, "new")
        service.store([*old, *young, *new])
        for keys in (old, young):
            await service.client.prefetch("m", keys, request_id="r", wait_ms=5000)
            await service.client.cancel("r")
        before = await service.scrape()
        for _ in range(50):
            found = await wire.ask("POST", "/v1/lookup", {"model": "m", "keys": wire.keys(old)})
            assert found.body["pages"]["host"] == 2
        missing = await wire.ask("POST", "/v1/lookup", {"model": "m", "keys": wire.keys(new)})
        assert missing.body["pages"] == {"requested": 2, "host": 0, "stored": 2, "restorable": 2, "grantable": 2}
        after = await service.scrape()
        assert after == before
        assert (service.taken, len(service.engine.leases), len(service.engine.jobs)) == (0, 0, 0)
        # nor has it made the old pages young: they are the ones to go
        await service.client.prefetch("m", new, wait_ms=5000)
        assert (await service.client.lookup("m", young)).pages.host == 2
        assert (await service.client.lookup("m", old)).pages.host == 0
        await service.idle()


async def test_a_lookup_says_what_would_be_granted(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(8)) as service:
        a, b = make_keys(6, "a"), make_keys(10, "b")
        service.store([*a, *b])
        assert (await service.client.lookup("m", b)).pages.grantable == 8
        await service.client.prefetch("m", a, wait_ms=5000)
        cut = (await service.client.lookup("m", b)).pages
        assert (cut.stored, cut.grantable) == (10, 2)
        ahead = (await service.client.lookup("m", b, device_pages=7)).pages
        assert (ahead.host, ahead.stored, ahead.grantable) == (7, 10, 9)
