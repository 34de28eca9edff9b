"""The life of a prefetch over HTTP: start, wait, repeat, finish, cancel, forget, queue."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from api.wire import Wire
from forestage.storage.base import ReadOutcome
from support.live import PAGE_BYTES, Live, hybrid, kv_only, live, make_keys, sum_of, until

KEYS = make_keys(8)


@pytest.fixture
async def narrow(tmp_path: Path) -> AsyncIterator[Live]:
    """A service that runs one job of 8 pages at a time, and lets two wait."""
    settings = {"max_inflight_fraction": 8 / 64, "queue_limit": 2}
    async with live(tmp_path, kv_only(64), prefetch=settings) as running:
        for chain in "abcdef":
            running.store(make_keys(8, chain))
        yield running


async def test_200_when_done_within_the_wait_else_202(wire: Wire) -> None:
    service = wire.service
    service.store(KEYS)
    service.storage.fault(0, KEYS[7], hold=True)
    at_once = await wire.prefetch(KEYS, request_id="r")
    began = time.monotonic()
    too_short = await wire.prefetch(KEYS, request_id="r", wait_ms=100)
    assert 0.1 <= time.monotonic() - began < 2
    assert (at_once.status, too_short.status) == (202, 202)
    service.storage.release()
    assert (await wire.prefetch(KEYS, request_id="r", wait_ms=5000)).status == 200
    assert (await wire.prefetch(KEYS, request_id="r")).status == 200
    # done before the answer is written: everything was resident
    other = await wire.prefetch(KEYS)
    assert (other.status, other.body["state"], other.body["loaded"]) == (200, "done", 0)
    await service.idle()


async def test_a_wait_ends_as_soon_as_the_job_does(wire: Wire) -> None:
    service = wire.service
    service.store(KEYS)
    service.storage.fault(0, KEYS[7], hold=True)
    posted = asyncio.create_task(wire.prefetch(KEYS, request_id="r", wait_ms=60_000))
    await until(lambda: "r" in service.engine.jobs)
    polled = [asyncio.create_task(wire.ask("GET", "/v1/prefetch/r?wait_ms=60000")) for _ in range(3)]
    too_short = await wire.ask("GET", "/v1/prefetch/r?wait_ms=50")
    assert (too_short.status, too_short.body["state"]) == (200, "loading")
    began = time.monotonic()
    service.storage.release()
    answers = await asyncio.gather(posted, *polled)
    assert time.monotonic() - began < 2
    assert [(a.status, a.body["outcome"]) for a in answers] == [(200, "complete")] * 4


async def test_ready_only_grows_and_lengths_do_not_change(service: Live) -> None:
    service.store(KEYS)
    service.storage.fault(delay_s=0.01)
    job = await service.client.prefetch("m", KEYS, request_id="r")
    seen = [job]
    async with asyncio.timeout(10):
        while not seen[-1].done:
            seen.append(await service.client.get_prefetch("r"))
    ready = [job.pages.ready for job in seen]
    assert ready == sorted(ready)
    assert {job.pages.granted for job in seen if job.state == "loading"} <= {8}
    assert len({(job.state, job.pages, job.slots["kv"]) for job in [seen[-1], await service.client.finish("r")]}) == 1


async def test_the_same_request_again_is_the_same_job(wire: Wire) -> None:
    service = wire.service
    service.store(KEYS)
    service.storage.fault(0, KEYS[0], hold=True)
    for _ in range(3):
        answer = await wire.prefetch(KEYS, request_id="r")
        assert (answer.status, answer.body["request_id"]) == (202, "r")
    # however it is written
    other = Wire(service, "json" if wire.encoding == "msgpack" else "msgpack")
    assert (await other.prefetch(KEYS, request_id="r", wait_ms=1)).status == 202
    service.storage.release()
    done = await wire.ask("GET", "/v1/prefetch/r?wait_ms=5000")
    again = await wire.prefetch(KEYS, request_id="r", wait_ms=5000)
    assert again.body["slots"] == done.body["slots"]
    assert set(service.storage.reads.values()) == {1}
    samples = await service.quiet()
    assert sum_of(samples, "prefetch_requests_total") == 1
    assert sum_of(samples, "leases") == 1


async def test_what_a_request_leaves_out_is_the_configured_default(tmp_path: Path) -> None:
    defaults = {"min_pages": 3, "deadline_ms": 200}
    lease = {"default_ms": 4000, "max_ms": 5000}
    async with live(tmp_path, kv_only(64), prefetch=defaults, lease=lease) as service:
        service.store(KEYS)
        declined = await service.client.prefetch("m", KEYS[:2], wait_ms=5000)
        assert (declined.outcome, dict(declined.shortfall)) == ("declined", {"below_min_pages": 2})
        brought = await service.client.prefetch("m", KEYS[:4], wait_ms=5000)
        assert brought.lease is not None
        assert 3000 < brought.lease.expires_in_ms <= 4000
        longer = await service.client.prefetch("m", KEYS[:2], min_pages=1, lease_ms=100_000, wait_ms=5000)
        assert longer.lease is not None
        assert 4000 < longer.lease.expires_in_ms <= 5000  # cut to lease.max_ms
        service.storage.fault(hold=True)
        late = await service.client.prefetch("m", KEYS, wait_ms=5000)
        assert (late.outcome, dict(late.shortfall)) == ("partial", {"deadline": 4})


async def test_finish_keeps_what_is_ready(wire: Wire) -> None:
    service = wire.service
    service.store(KEYS)
    service.storage.fault(0, KEYS[5], hold=True)
    await wire.prefetch(KEYS, request_id="r")
    await until(lambda: service.engine.jobs["r"].contiguous == 5)
    answers = [await wire.ask("POST", "/v1/prefetch/r/finish") for _ in range(2)]
    for answer in answers:
        assert (answer.status, answer.body["state"], answer.body["outcome"]) == (200, "done", "partial")
        assert (answer.body["pages"]["granted"], answer.body["pages"]["ready"]) == (8, 5)
        assert (answer.body["shortfall"], len(answer.body["slots"]["kv"])) == ({"finished": 3}, 5)
    service.storage.release()
    await service.idle()


async def test_finish_of_a_hybrid_job_reads_the_state_of_a_lower_boundary(tmp_path: Path) -> None:
    async with live(tmp_path, hybrid(16, 4), prefetch={"settle_ms": 2000}) as service:
        service.store(KEYS, states=[4, 8])
        service.storage.fault(0, KEYS[6], hold=True)
        await service.client.prefetch("m", KEYS, request_id="r")
        await until(lambda: service.engine.jobs["r"].contiguous == 6)
        done = await service.client.finish("r")
        assert (done.pages.ready, dict(done.shortfall)) == (4, {"finished": 4})
        assert {name: len(slots) for name, slots in done.slots.items()} == {"kv": 4, "state": 1}
        service.storage.release()
        await service.idle()


async def test_finish_before_anything_is_known(wire: Wire) -> None:
    wire.service.storage.hang_probes()
    await wire.prefetch(KEYS, request_id="r")
    done = await wire.ask("POST", "/v1/prefetch/r/finish")
    assert (done.body["outcome"], done.body["shortfall"]) == ("miss", {"finished": 8})


async def test_delete_cancels_and_forgets(wire: Wire) -> None:
    service = wire.service
    service.store(KEYS)
    service.storage.fault(0, KEYS[5], hold=True)
    await wire.prefetch(KEYS, request_id="r")
    await until(lambda: service.engine.jobs["r"].contiguous == 5)
    waiting = asyncio.create_task(wire.ask("GET", "/v1/prefetch/r?wait_ms=60000"))
    await until(lambda: len(service.parts.service._waiting) == 1)
    for _ in range(2):
        answer = await wire.ask("DELETE", "/v1/prefetch/r")
        assert (answer.status, answer.body) == (204, None)
    cancelled = await waiting
    assert (cancelled.body["state"], cancelled.body["outcome"]) == ("done", "cancelled")
    assert (cancelled.body["pages"]["ready"], cancelled.body["shortfall"]) == (5, {"cancelled": 3})
    assert not {"lease", "slots"} & set(cancelled.body)
    for method, path in (("GET", "/v1/prefetch/r"), ("POST", "/v1/prefetch/r/finish")):
        unknown = await wire.ask(method, path)
        assert (unknown.status, unknown.body["type"]) == (404, "unknown-job")
    service.storage.release()
    await service.quiet()
    assert service.taken == 0
    # the id is free for something else
    assert (await wire.prefetch(KEYS[:2], request_id="r", wait_ms=5000)).status == 200


async def test_delete_of_a_done_job_releases_its_lease(wire: Wire) -> None:
    service = wire.service
    service.store(KEYS)
    done = await wire.prefetch(KEYS, request_id="r", wait_ms=5000)
    for _ in range(2):
        assert (await wire.ask("DELETE", "/v1/prefetch/r")).status == 204
    assert service.taken == 0
    assert (await wire.ask("DELETE", f"/v1/leases/{done.body['lease']['id']}")).status == 204
    renewal = await wire.ask("POST", f"/v1/leases/{done.body['lease']['id']}/renew", {"lease_ms": 1000})
    assert renewal.status == 410
    await service.idle()


async def test_a_done_job_is_forgotten_in_time_and_its_lease_lives_on(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(64), prefetch={"keep_done_ms": 100}) as service:
        service.store(KEYS)
        wire = Wire(service, "json")
        done = await wire.prefetch(KEYS, request_id="r", wait_ms=5000)
        await until(lambda: "r" not in service.engine.jobs)
        assert (await wire.ask("GET", "/v1/prefetch/r")).status == 404
        assert service.taken == 8
        assert (await wire.prefetch(KEYS[:3], request_id="r", wait_ms=5000)).status == 200  # no conflict any more
        renewal = await wire.ask("POST", f"/v1/leases/{done.body['lease']['id']}/renew", {"lease_ms": 1000})
        assert renewal.status == 200
        await service.idle()


@pytest.mark.parametrize("stored", [4, 5, 6])
async def test_device_pages_are_neither_asked_nor_read(service: Live, stored: int) -> None:
    service.store(KEYS[:stored])
    found = await service.client.prefetch("m", KEYS, device_pages=5, wait_ms=5000)
    gain = max(0, stored - 5)
    assert (found.pages.host, found.pages.stored, found.pages.ready) == (5, 5 + gain, 5 + gain)
    assert found.outcome == ("partial" if gain else "miss")
    assert dict(found.shortfall) == {"not_stored": 3 - gain}
    assert set(service.storage.reads) == {(0, key) for key in KEYS[5:stored]}
    assert len(found.slots.get("kv", ())) == gain
    if gain:
        slot = service.parts.pool.shard_views(0, found.slots["kv"][0])[0]
        assert bytes(slot) == bytes(service.memory.peek(service.engine.pools["m"].layout, 0, KEYS[5])[0] or b"")


async def test_min_pages_declines_a_small_gain(wire: Wire) -> None:
    service = wire.service
    service.store(KEYS)
    first = await wire.prefetch(KEYS[:3], wait_ms=5000)
    declined = await wire.prefetch(KEYS, device_pages=3, min_pages=6, wait_ms=5000)
    assert (declined.body["outcome"], declined.body["shortfall"]) == ("declined", {"below_min_pages": 5})
    assert declined.body["pages"]["granted"] == 8
    assert not {"lease", "slots"} & set(declined.body)
    # what is usable without a read is handed out all the same
    kept = await wire.prefetch(KEYS, min_pages=6, wait_ms=5000)
    assert (kept.body["outcome"], kept.body["pages"]["ready"], kept.body["loaded"]) == ("partial", 3, 0)
    assert kept.body["slots"] == first.body["slots"]
    assert sum(service.storage.reads.values()) == 3
    assert (await wire.prefetch(KEYS, min_pages=5, wait_ms=5000)).body["outcome"] == "complete"


async def test_the_queue_goes_by_priority_then_deadline_then_arrival(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(64), prefetch={"max_inflight_fraction": 8 / 64}) as service:
        for chain in "abcdef":
            service.store(make_keys(8, chain))
        service.storage.fault(hold=True)
        terms: dict[str, dict[str, int]] = {
            "a": {},
            "b": {},
            "c": {"deadline_ms": 60_000},
            "d": {"deadline_ms": 50_000},
            "e": {"priority": 5},
            "f": {"priority": -1, "deadline_ms": 40_000},
        }
        states = {}
        for chain, more in terms.items():
            keys = make_keys(8, chain)
            job = await service.client.prefetch("m", keys, request_id=chain, **more)  # type: ignore[arg-type]
            states[chain] = job.state
        assert [chain for chain, state in states.items() if state == "queued"] == list("bcdef")
        samples = await service.scrape()
        assert sum_of(samples, "jobs", 'state="queued"') == 5
        assert sum_of(samples, "inflight_bytes") == 8 * PAGE_BYTES
        service.storage.release()
        for chain in terms:
            assert (await service.client.wait(chain, 10)).outcome == "complete"
        first_pages = {make_keys(8, chain)[0]: chain for chain in terms}
        order = [first_pages[key] for _, key in service.storage.log if key in first_pages]
        assert order == list("aedcbf")
        await service.idle()


async def test_a_full_queue_refuses_with_nothing_taken(narrow: Live) -> None:
    narrow.storage.fault(hold=True)
    wire = Wire(narrow, "json")
    for chain in "abc":
        assert (await wire.prefetch(make_keys(8, chain), request_id=chain)).status == 202
    before = (narrow.taken, len(narrow.engine.jobs), narrow.engine.admission.promised, await narrow.scrape())
    for wait_ms in (0, 5000):
        refused = await wire.prefetch(make_keys(8, "d"), request_id="d", wait_ms=wait_ms)
        assert (refused.status, refused.body["type"]) == (429, "queue-full")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await wire.ask("GET", "/v1/prefetch/d")).status == 404
    after = (narrow.taken, len(narrow.engine.jobs), narrow.engine.admission.promised, await narrow.scrape())
    assert after == before
    # a known job is not refused, nor one that needs no bytes
    assert (await wire.prefetch(make_keys(8, "c"), request_id="c")).status == 202
    assert (await wire.prefetch(KEYS, device_pages=8)).status == 200
    # a place that becomes free is given away
    await wire.ask("DELETE", "/v1/prefetch/b")
    assert (await wire.prefetch(make_keys(8, "d"), request_id="d")).body["state"] == "queued"
    narrow.storage.release()
    for chain in "acd":
        assert (await narrow.client.wait(chain, 10)).outcome == "complete"
    await narrow.idle()


@pytest.mark.parametrize("how", ["delete", "finish", "deadline"])
async def test_a_queued_job_can_be_ended(narrow: Live, how: str) -> None:
    narrow.storage.fault(hold=True)
    await narrow.client.prefetch("m", make_keys(8, "a"), request_id="a")
    deadline = 50 if how == "deadline" else None
    queued = await narrow.client.prefetch("m", make_keys(8, "b"), request_id="b", deadline_ms=deadline)
    assert queued.state == "queued"
    if how == "delete":
        await narrow.client.cancel("b")
        assert narrow.engine.admission.waiting == 0
    else:
        ended = await (narrow.client.finish("b") if how == "finish" else narrow.client.wait("b", 5))
        reason = "finished" if how == "finish" else "deadline"
        assert (ended.outcome, dict(ended.shortfall)) == ("miss", {reason: 8})
        assert ended.timing_ms["queued"] == ended.timing_ms["total"]
    narrow.storage.release()
    assert (await narrow.client.wait("a", 10)).outcome == "complete"
    await narrow.idle()


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (ReadOutcome.MISSING, "vanished"),
        (ReadOutcome.CORRUPT, "corrupt"),
        (ReadOutcome.ERROR, "storage_error"),
        (ReadOutcome.UNREACHABLE, "storage_error"),
    ],
)
async def test_a_page_that_cannot_be_read_cuts_the_prefix_there(wire: Wire, outcome: ReadOutcome, reason: str) -> None:
    service = wire.service
    service.store(KEYS)
    service.storage.fault(0, KEYS[5], outcome=outcome)
    answer = await wire.prefetch(KEYS, request_id="r", wait_ms=5000)
    assert answer.body["pages"] == {"requested": 8, "host": 0, "stored": 8, "restorable": 8, "granted": 8, "ready": 5}
    assert (answer.body["outcome"], answer.body["shortfall"]) == ("partial", {reason: 3})
    samples = await service.quiet()
    assert sum_of(samples, "shortfall_pages_total", f'reason="{reason}"') == 3
    assert sum_of(samples, "ready_pages_total") == 5
    assert sum_of(samples, "storage_errors_total", f'kind="{outcome}"') >= 1
    assert service.sweep() == 5  # nothing behind the gap is kept
    assert (await wire.ask("GET", "/v1/prefetch/r")).body["pages"] == answer.body["pages"]
    service.storage.fault()
    assert (await wire.prefetch(KEYS, wait_ms=5000)).body["outcome"] == "complete"
    await service.idle()


async def test_an_l3_that_cannot_be_asked_shortens_and_says_so(wire: Wire) -> None:
    service = wire.service
    service.store(KEYS)
    await wire.prefetch(KEYS[:3], wait_ms=5000)
    service.storage.refuse_probes = True
    answer = await wire.prefetch(KEYS, wait_ms=5000)
    assert (answer.status, answer.body["outcome"]) == (200, "partial")
    assert (answer.body["pages"]["ready"], answer.body["shortfall"]) == (3, {"storage_unavailable": 5})
    found = await wire.ask("POST", "/v1/lookup", {"model": "m", "keys": wire.keys(KEYS)})
    assert (found.status, found.body["pages"]["stored"]) == (200, 3)
    samples = await service.scrape()
    assert sum_of(samples, "storage_up") == 0
    service.storage.refuse_probes = False
    assert (await wire.prefetch(KEYS, wait_ms=5000)).body["outcome"] == "complete"
    assert sum_of(await service.scrape(), "storage_up") == 1
    await service.idle()
