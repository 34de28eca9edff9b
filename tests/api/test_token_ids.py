"""Token ids in place of keys: the engines' vectors through the service, on every route, and beside the loop."""

import asyncio
import struct
import sys
import threading
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import pytest_asyncio

from api.raw import leave, send_request
from api.wire import Wire
from forestage.core.job import Reason
from forestage.prefetch.page_keys import AT_ONCE_TOKENS
from forestage_client import BadRequest, Prompt
from forestage_client.hashing import HashScheme
from hashing.vectors import SGLANG, VLLM, Vector
from support.live import Live, kv_only, live, make_keys, sum_of, until

VECTORS = [vector for vector in (*SGLANG, *VLLM) if vector.prior is None]
TOKENS = [1000 + token % 977 for token in range(100)]
KEYS = HashScheme("sglang", 16).keys_of(TOKENS)
LONG = [token % 150_000 for token in range(AT_ONCE_TOKENS + 16)]


def _hashing(name: str = "m", slots: int = 64, page_tokens: int = 16, **hashed: Any) -> dict[str, Any]:
    return {**kv_only(slots, name), "page_tokens": page_tokens, "hash": hashed or {"scheme": "sglang"}}


@pytest_asyncio.fixture
async def service(tmp_path: Path) -> AsyncIterator[Live]:
    async with live(tmp_path, _hashing(), kv_only(8, "plain"), prefetch={"max_pages": 256}) as running:
        yield running


@contextmanager
def held(service: Live) -> Iterator[None]:
    """Keep the thread that hashes long prompts from beginning any."""
    release = threading.Event()
    held = service.parts.service.page_keys._thread.submit(release.wait)
    try:
        yield
    finally:
        release.set()
        held.result(10)


def queued(service: Live) -> int:
    """Count the long prompts that wait for the thread."""
    return service.parts.service.page_keys._thread._work_queue.qsize()


def _model_of(vector: Vector) -> dict[str, Any]:
    scheme = vector.scheme
    hashed = {"scheme": scheme.name, "bigram": scheme.bigram} | ({"seed": scheme.seed} if scheme.seed else {})
    return _hashing(_name_of(vector), 1, scheme.page_tokens, **hashed)


def _name_of(vector: Vector) -> str:
    return f"{vector.scheme.name}-{vector.scheme.page_tokens}-{vector.scheme.seed}-{vector.scheme.bigram}"


async def test_every_vector_in_every_spelling(tmp_path: Path) -> None:
    models = {_name_of(vector): _model_of(vector) for vector in VECTORS}
    async with live(tmp_path, *models.values()) as running:
        for vector in VECTORS:
            body = {"model": _name_of(vector), **vector.body()}
            spellings: list[Any] = [vector.tokens]
            if max(vector.tokens) < 2**32:
                spellings.append(struct.pack(f"<{len(vector.tokens)}I", *vector.tokens))
            answer = await running.http.post("/v1/hash", json={**body, "token_ids": vector.tokens})
            assert answer.json() == {
                "model": body["model"],
                "scheme": vector.scheme.name,
                "page_tokens": vector.scheme.page_tokens,
                "pages": len(vector.keys),
                "keys": [key.hex() for key in vector.keys],
            }, vector.id
            for token_ids in spellings:
                packed = await Wire(running, "msgpack").ask("POST", "/v1/hash", {**body, "token_ids": token_ids})
                assert packed.body["keys"] == b"".join(vector.keys), vector.id
                assert packed.body["key_bytes"] == vector.scheme.key_bytes
            hashed = await running.client.hash(body["model"], Prompt(vector.tokens, **vector.inputs))
            assert hashed.keys == tuple(vector.keys)


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
async def test_prefetch_lookup_and_lease(service: Live, encoding: Any) -> None:
    service.store(KEYS[:4])
    wire = Wire(service, encoding)
    shown = [key.hex() for key in KEYS] if encoding == "json" else b"".join(KEYS)
    body = {"model": "m", "token_ids": TOKENS}
    found = await wire.ask("POST", "/v1/lookup", {**body, "include_keys": True})
    assert (found.body["pages"]["requested"], found.body["pages"]["stored"], found.body["keys"]) == (6, 4, shown)
    job = await wire.ask("POST", "/v1/prefetch", {**body, "wait_ms": 5000, "include_keys": True})
    assert (job.body["pages"]["ready"], job.body["shortfall"], job.body["keys"]) == (4, {"not_stored": 2}, shown)
    leased = await wire.ask("POST", "/v1/leases", {**body, "include_keys": True, "device_pages": 1})
    assert (leased.body["pages"]["ready"], leased.body["keys"], len(leased.body["slots"]["kv"])) == (4, shown, 3)
    for path in ("/v1/lookup", "/v1/prefetch", "/v1/leases"):
        plain = await wire.ask("POST", path, body)
        assert (plain.status in (200, 202), "keys" in plain.body) == (True, False)
    by_key = {"model": "m", "keys": wire.keys(KEYS), "include_keys": True}
    assert (await wire.ask("POST", "/v1/lookup", by_key)).body["keys"] == shown
    await service.idle()


async def test_the_client(service: Live) -> None:
    service.store(KEYS)
    client = service.client
    prompt = Prompt(TOKENS, include_keys=True)
    assert (await client.hash("m", prompt)).keys == tuple(KEYS)
    assert (await client.lookup("m", prompt)).keys == tuple(KEYS)
    job = await client.prefetch("m", prompt, wait_ms=5000)
    assert (job.outcome, job.keys) == ("complete", tuple(KEYS))
    leased = await client.lease("m", Prompt(TOKENS))
    assert (leased.pages.ready, leased.keys) == (6, ())
    salted = await client.prefetch("m", Prompt(TOKENS, cache_salt="s", extra_key="e", lora="l"), wait_ms=5000)
    assert (salted.outcome, salted.shortfall) == ("miss", {"not_stored": 6})
    with pytest.raises(BadRequest) as caught:
        await client.lookup("plain", prompt)
    assert (caught.value.status, caught.value.slug) == (422, "no-hash-scheme")
    assert [model.hash for model in await client.models()] == ["sglang", None]
    assert (await client.hash("m", Prompt([5] * 15))).keys == ()
    nothing = await client.prefetch("m", Prompt([5] * 15), wait_ms=1000)
    assert (nothing.outcome, nothing.pages.requested) == ("complete", 0)


async def test_the_same_tokens_are_the_same_request(service: Live) -> None:
    body = {"model": "m", "request_id": "one"}
    first = await service.http.post("/v1/prefetch", json={**body, "token_ids": TOKENS, "wait_ms": 5000})
    assert first.status_code == 200
    same: list[dict[str, Any]] = [
        {"token_ids": TOKENS},
        {"token_ids": [*TOKENS, 7]},  # makes no further page whole
        {"token_ids": TOKENS, "include_keys": True},
        {"keys": [key.hex() for key in KEYS]},
    ]
    for prefix in same:
        again = await service.http.post("/v1/prefetch", json={**body, **prefix})
        assert (again.status_code, again.json()["request_id"]) == (200, "one")
    for other in ({"token_ids": TOKENS[1:]}, {"token_ids": TOKENS, "cache_salt": "s"}):
        assert (await service.http.post("/v1/prefetch", json={**body, **other})).status_code == 409
    assert sum_of(await service.quiet(), "prefetch_requests_total") == 1


async def test_pins_and_evict_take_them_and_writes_do_not(service: Live) -> None:
    service.store(KEYS[:4])
    prompt = Prompt(TOKENS)
    await service.client.prefetch("m", prompt, wait_ms=5000)
    pin = await service.client.pin("m", prompt, 60_000)
    assert pin.id is not None
    assert pin.pages.ready == 4
    await service.client.unpin(pin.id)
    await service.quiet()
    pinning, evicting = {"ttl_ms": 1000}, dict[str, int]()
    for path, more in (("/v1/pins", pinning), ("/v1/evict", evicting)):
        body = {"model": "m", "token_ids": TOKENS, "include_keys": True, **more}
        assert (await service.http.post(path, json=body)).json()["keys"] == [key.hex() for key in KEYS]
    refused = await service.http.post("/v1/writes", json={"model": "m", "token_ids": TOKENS})
    assert (refused.status_code, refused.json()["type"]) == (422, "invalid-request")


MIXED = {"keys": [key.hex() for key in make_keys(2)], "token_ids": TOKENS}
BAD: list[tuple[dict[str, Any], int, str]] = [
    (MIXED, 422, "invalid-request"),
    ({"token_ids": TOKENS, "key_bytes": 32}, 422, "invalid-request"),
    ({"keys": MIXED["keys"], "cache_salt": "s"}, 422, "invalid-request"),
    ({"keys": MIXED["keys"], "mm": []}, 422, "invalid-request"),
    ({"token_ids": TOKENS, "model": "plain"}, 422, "no-hash-scheme"),
    ({"token_ids": TOKENS, "model": "other"}, 404, "unknown-model"),
    ({"token_ids": TOKENS, "model": 5}, 422, "invalid-request"),
    ({"token_ids": "abc"}, 422, "invalid-request"),
    ({"token_ids": None}, 422, "invalid-request"),
    ({"token_ids": {"0": 1}}, 422, "invalid-request"),
    *(({"token_ids": [*TOKENS, token]}, 422, "invalid-request") for token in (-1, 2**63, 1.0, "1", None, True, [1])),
    *(({"token_ids": [*LONG, token]}, 422, "invalid-request") for token in (-1, 2**63, 1.0, "1", None, False, [1])),
    ({"token_ids": [1] * (257 * 16)}, 413, "too-large"),
    ({"token_ids": TOKENS, "extra_key": 5}, 422, "invalid-request"),
    ({"token_ids": TOKENS, "cache_salt": ["s"]}, 422, "invalid-request"),
    ({"token_ids": TOKENS, "lora": {"name": "a", "path": "b"}}, 422, "invalid-request"),
    ({"token_ids": TOKENS, "mm": [{"identifier": "i", "offset": 0, "length": 1}]}, 422, "invalid-request"),
    ({"token_ids": TOKENS, "mm": [{"identifier": "i", "offset": 0, "length": 0}]}, 422, "invalid-request"),
    ({"token_ids": TOKENS, "device_pages": 7}, 422, "invalid-request"),
    ({"token_ids": TOKENS, "include_keys": 1}, 422, "invalid-request"),
    ({"token_ids": TOKENS, "salt": "s"}, 422, "invalid-request"),
]


async def test_bad_requests(service: Live) -> None:
    for body, status, slug in BAD:
        for path in ("/v1/lookup", "/v1/prefetch", "/v1/leases"):
            answer = await service.http.post(path, json={"model": "m", **body})
            assert (answer.status_code, answer.json()["type"]) == (status, slug), (path, str(body)[-80:])
            assert len(answer.content) < 2000
    packed = await service.http.post(
        "/v1/hash",
        content=msgpack.packb({"model": "m", "token_ids": b"12345"}),
        headers={"Content-Type": "application/msgpack"},
    )
    assert (packed.status_code, packed.json()["type"]) == (422, "invalid-request")
    for more in ({}, {"keys": MIXED["keys"]}, {"token_ids": TOKENS, "device_pages": 0}):
        answer = await service.http.post("/v1/hash", json={"model": "m", **more})
        assert (answer.status_code, answer.json()["type"]) == (422, "invalid-request")
    assert sum_of(await service.quiet(), "jobs") == 0


async def test_bad_items_and_adapters_of_vllm(tmp_path: Path) -> None:
    item = {"identifier": "i", "offset": 90, "length": 10}
    async with live(tmp_path, _hashing(scheme="vllm-sha256-cbor")) as running:

        async def status(**more: Any) -> int:
            body = {"model": "m", "token_ids": TOKENS, **more}
            return (await running.http.post("/v1/hash", json=body)).status_code

        assert await status(mm=[item], lora={"name": "n", "path": "p"}) == 200
        assert await status(mm=[{**item, "length": 11}]) == 422
        assert await status(mm=[{**item, "offset": 0, "length": 100}] * 4) == 200
        assert await status(mm=[{**item, "offset": 0, "length": 100}] * 5) == 422
        assert await status(lora="n") == 422
        assert await status(lora={"name": "n"}) == 422
        assert await status(extra_key="e") == 422
        assert await status(token_ids=[*TOKENS, 2**32]) == 422


async def test_long_prompts_leave_the_loop_free(service: Live) -> None:
    scheme = HashScheme("vllm-sha256-cbor", 16)
    tokens = array("I", (token * 7919 % 150_000 for token in range(500_000)))
    hashing = asyncio.create_task(service.parts.service.page_keys.of(scheme, Prompt(tokens)))
    healthy, before = 0, sys.getswitchinterval()
    sys.setswitchinterval(0.0005)  # as the service runs
    try:
        while not hashing.done():
            healthy += await service.client.healthy()
    finally:
        sys.setswitchinterval(before)
    assert len(await hashing) == 500_000 // 16
    assert healthy > 5  # were it done on the loop, one


async def test_the_deadline_counts_from_the_arrival(service: Live) -> None:
    service.storage.hang_probes()
    with held(service):
        body = {"model": "m", "token_ids": LONG, "deadline_ms": 300, "wait_ms": 10_000}
        asked = asyncio.create_task(service.http.post("/v1/prefetch", json=body))
        await until(lambda: queued(service) == 1)
        end = service.parts.service.now() + 0.3
        await until(lambda: service.parts.service.now() > end)
        assert not service.engine.jobs
        released = service.parts.service.now()
    answer = (await asked).json()
    (job,) = service.engine.jobs.values()
    assert job.deadline is not None
    assert job.deadline == pytest.approx(job.timing.arrived + 0.3)
    assert job.deadline < released
    assert (answer["state"], answer["shortfall"]) == ("done", {Reason.DEADLINE.value: answer["pages"]["requested"]})
    assert answer["timing_ms"]["queued"] > 290


async def test_a_client_that_leaves_while_its_prompt_waits(service: Live) -> None:
    service.storage.hang_probes()
    with held(service):
        body = {"model": "m", "token_ids": LONG, "wait_ms": 60_000}
        sock = send_request(("127.0.0.1", service.port), "POST", "/v1/prefetch", body)
        await until(lambda: queued(service) == 1)
        leave(sock, "rst")
    await until(lambda: service.asked == 0 and not service.engine.live)
    samples = await service.scrape()
    assert sum_of(samples, "prefetch_requests_total", 'outcome="cancelled"') == 1
    assert service.taken == 0


async def test_a_stop_while_prompts_wait(service: Live) -> None:
    with held(service):
        paths = ("/v1/prefetch", "/v1/lookup", "/v1/hash")
        asked = [asyncio.create_task(service.http.post(path, json={"model": "m", "token_ids": LONG})) for path in paths]
        await until(lambda: queued(service) == 3)
        await service.parts.service.stop(5)
        await asyncio.wait([service.running])
        for answer in await asyncio.gather(*asked):
            assert (answer.status_code, answer.json()["type"]) == (503, "stopping")
            assert int(answer.headers["retry-after"]) >= 1
        late = await service.http.post("/v1/hash", json={"model": "m", "token_ids": LONG})
        assert late.status_code == 503


class _Watched(list[int]):
    """Token ids that know whether somebody looked into them."""

    seen = False

    def __getitem__(self, at: Any) -> Any:
        self.seen = True
        return super().__getitem__(at)


async def test_a_wait_that_is_cancelled_begins_nothing(service: Live) -> None:
    page_keys, scheme = service.parts.service.page_keys, HashScheme("sglang", 16)
    forsaken, wanted = _Watched(LONG), _Watched(LONG)
    with held(service):
        waiting = asyncio.create_task(page_keys.of(scheme, Prompt(forsaken)))
        await until(lambda: queued(service) == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert await page_keys.of(scheme, Prompt(wanted)) == tuple(scheme.keys_of(LONG))
    assert (forsaken.seen, wanted.seen) == (False, True)
