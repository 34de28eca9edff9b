"""KV events over real ZeroMQ sockets: what a subscriber believes is what is resident, or it can tell that it is not."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from events.subscriber import Subscriber, Table, ask_again, subscribed
from forestage.core.errors import StartError
from forestage.prefetch.kv_publisher import KvPublisher
from forestage.prefetch.zmq_sockets import ZmqSockets
from support.live import Live, hybrid, kv_only, live, make_keys, until

ANYWHERE = "tcp://127.0.0.1:*"


@asynccontextmanager
async def publishing(path: Path, *models: dict[str, Any], **events: Any) -> AsyncIterator[tuple[Live, KvPublisher]]:
    settings = {"publish": True, "endpoint": ANYWHERE, "replay_endpoint": ANYWHERE, **events}
    async with live(path, *models, events=settings) as service:
        assert service.parts.publisher is not None
        yield service, service.parts.publisher
        service.parts.publisher.batches.check_integrity()


async def bring(service: Live, keys: list[bytes], model: str = "m") -> None:
    service.store(keys, model=model)
    job = await service.client.prefetch(model, keys, wait_ms=10_000)
    assert job.pages.ready == len(keys)
    await service.client.cancel(job.request_id)


async def joined(service: Live, subscriber: Subscriber, publisher: KvPublisher) -> None:
    """Return once the subscription has arrived; what was published before is asked for again."""
    for number in range(1000):
        await bring(service, make_keys(1, f"knock{number}"))
        try:
            async with asyncio.timeout(0.05):
                first = (await subscriber.next()).number
                break
        except TimeoutError:
            continue
    table = Table()
    for message in await ask_again(publisher.endpoints[1], 0):
        if message.number <= first:
            table.take(message)
    assert table.numbers == list(range(first + 1))
    subscriber.table = table


def long_keys(count: int, chain: str) -> list[bytes]:
    return [key + key for key in make_keys(count, chain)]


def resident(service: Live, component: int = 0, model: str = "m") -> set[bytes]:
    return set(service.engine.pools[model].index[component].resident_pages().values())


@pytest.mark.parametrize("form", ["array", "map"])
async def test_a_subscriber_knows_what_is_resident(tmp_path: Path, form: str) -> None:
    group = 0 if form == "map" else None
    async with publishing(tmp_path, kv_only(16), form=form, data_parallel_rank=3) as (service, publisher):
        with subscribed(publisher.endpoints[0]) as subscriber:
            await joined(service, subscriber, publisher)
            before = time.time()
            a, b = make_keys(12), make_keys(12, "b")
            await bring(service, a)
            await subscriber.until(resident(service), group)
            await bring(service, b)
            await subscriber.until(resident(service), group)
            assert set(b) <= resident(service)
            stored = await ask_again(publisher.endpoints[1], subscriber.table.numbers[-1])
            assert before - 1 < stored[0].timestamp < time.time() + 1
            assert (stored[0].rank, stored[0].topic) == (3, b"")
            assert subscriber.table.numbers == list(range(len(subscriber.table.numbers)))
            (event, *_) = [e for m in await ask_again(publisher.endpoints[1], 1) for e in m.events]
            assert (event["type"], event["parent_block_hash"], event["token_ids"]) == ("BlockStored", None, [])
            assert event["block_size"] == 16
        await service.idle()


async def test_a_block_of_a_hybrid_model(tmp_path: Path) -> None:
    async with publishing(tmp_path, hybrid(8, 2), form="map") as (service, publisher):
        keys = make_keys(6)
        with subscribed(publisher.endpoints[0]) as subscriber:
            service.store(keys, states=[3, 6])
            await service.client.prefetch("m", keys, wait_ms=10_000)
            while not subscriber.table.numbers:
                for message in await ask_again(publisher.endpoints[1], 0):
                    subscriber.table.take(message)
            while subscriber.table.blocks != {0: resident(service, 0), 1: resident(service, 1)}:
                await subscriber.next()


async def test_hashes_are_the_engines(tmp_path: Path) -> None:
    models = [{**kv_only(8, name), "hash": {"scheme": name}} for name in ("vllm-sha256-cbor", "sglang")]
    topic = "kv@10.0.0.1:8000@{model}"
    async with publishing(tmp_path, *models, topic=topic) as (service, publisher):
        keys = make_keys(3)
        for model in models:
            await bring(service, keys, model["name"])
        tables = {model["name"]: Table() for model in models}
        while sum(bool(table.blocks) for table in tables.values()) < 2:
            tables = {model["name"]: Table() for model in models}
            for message in await ask_again(publisher.endpoints[1], 0):
                tables[message.topic.decode().removeprefix("kv@10.0.0.1:8000@")].take(message)
        assert tables["vllm-sha256-cbor"].blocks == {None: {int.from_bytes(key[-8:], "big") for key in keys}}
        signed = {int.from_bytes(bytes.fromhex(key.hex()[:16]), "big", signed=True) for key in keys}
        assert tables["sglang"].blocks == {None: signed}


async def test_one_topic_only(tmp_path: Path) -> None:
    async with publishing(tmp_path, kv_only(8), kv_only(8, "n"), topic="{model}") as (service, publisher):
        with subscribed(publisher.endpoints[0], b"n") as subscriber:
            reading = asyncio.create_task(subscriber.next())
            while not reading.done():
                await bring(service, make_keys(1, f"m{publisher.batches.next}"))
                await bring(service, make_keys(1, f"n{publisher.batches.next}"), "n")
            assert (await reading).topic == b"n"
            assert subscriber.table.topics == {b"n"}


async def test_who_comes_late_is_told_again(tmp_path: Path) -> None:
    async with publishing(tmp_path, kv_only(16)) as (service, publisher):
        for name in "abc":
            await bring(service, make_keys(12, name))
        table = Table()
        for message in await ask_again(publisher.endpoints[1], 0):
            table.take(message)
        assert table.numbers == list(range(publisher.batches.next))
        assert table.blocks == {None: resident(service)}
        later = await ask_again(publisher.endpoints[1], 2)
        assert [message.number for message in later] == list(range(2, publisher.batches.next))
        assert await ask_again(publisher.endpoints[1], publisher.batches.next) == []
        assert await ask_again(publisher.endpoints[1], 2**64 - 2) == []


async def test_what_is_no_request_is_passed_over(tmp_path: Path) -> None:
    async with publishing(tmp_path, kv_only(16)) as (service, publisher):
        await bring(service, make_keys(2))
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(publisher.endpoints[1])
            for frames in ([b"x"], [b"", b"", b""], [b"", b"short"], [b"no", bytes(8)]):
                await socket.send_multipart(frames)
            await socket.send_multipart([b"", bytes(8)])
            async with asyncio.timeout(20):
                answer = await socket.recv_multipart()
            assert answer[:3] == [b"", b"", bytes(8)]
        assert await ask_again(publisher.endpoints[1], 0)


async def test_a_lost_range_shows(tmp_path: Path) -> None:
    async with publishing(tmp_path, kv_only(4), buffer_steps=5) as (service, publisher):
        for number in range(20):
            await bring(service, make_keys(4, f"{number}"))
        kept = await ask_again(publisher.endpoints[1], 0)
        numbers = [message.number for message in kept]
        assert numbers == list(range(publisher.batches.next - 5, publisher.batches.next))
        assert numbers[0] > 0  # which says that those before are lost


async def test_a_slow_subscriber_delays_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that reads nothing loses batches, and can tell by their numbers; one that reads loses none."""
    monkeypatch.setattr("forestage.prefetch.zmq_sockets._SUBSCRIBER_HWM", 50)
    async with publishing(tmp_path, kv_only(2000), form="map") as (service, publisher):
        with (
            subscribed(publisher.endpoints[0], hwm=1, buffer=4096) as slow,
            subscribed(publisher.endpoints[0]) as quick,
        ):
            await joined(service, quick, publisher)
            await joined(service, slow, publisher)
            reading = asyncio.create_task(_read_for_ever(quick))
            chains = [long_keys(2000, name) for name in "ab"]
            # More than may be due to one peer, and than sockets hold beside.
            while publisher.batches._bytes < 6 << 20:
                for chain in chains:
                    await bring(service, chain)
            end = publisher.batches.next - 1
            await until(lambda: quick.table.numbers[-1] >= end, 20)
            reading.cancel()
            assert quick.table.numbers == list(range(quick.table.numbers[-1] + 1))
            numbers = [(await slow.receive()).number]
            while numbers[-1] <= end:
                try:
                    async with asyncio.timeout(0.05):
                        numbers.append((await slow.receive()).number)
                except TimeoutError:
                    await bring(service, make_keys(1, f"after{numbers[-1]}"))
            assert numbers == sorted(numbers)
            assert len(numbers) < numbers[-1] - numbers[0] + 1


async def _read_for_ever(subscriber: Subscriber) -> None:
    while True:
        await subscriber.next()


async def test_without_replays(tmp_path: Path) -> None:
    async with publishing(tmp_path, kv_only(16), replay_endpoint="") as (service, publisher):
        await bring(service, make_keys(3))
        assert publisher.endpoints[1] == ""
        await until(lambda: publisher.batches.next >= 2)
        assert publisher.batches.oldest == publisher.batches.next


async def test_it_takes_no_place_of_a_listener(tmp_path: Path) -> None:
    async with publishing(tmp_path, kv_only(16), max_listeners=1) as (service, publisher):
        async with service.http.stream("GET", "/v1/events") as answer:
            assert answer.status_code == 200
        await bring(service, make_keys(3))
        await until(lambda: publisher.batches.next >= 2)


async def test_an_endpoint_in_use_is_said(tmp_path: Path) -> None:
    async with publishing(tmp_path, kv_only(16)) as (_, publisher):
        taken = publisher.endpoints[0]
        with pytest.raises(StartError, match=f"events.replay_endpoint: cannot bind {taken}"):
            ZmqSockets(ANYWHERE, taken)


async def test_a_peer_that_takes_no_replay_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forestage.prefetch.kv_publisher._PEER_PATIENCE_S", 0.2)
    async with publishing(tmp_path, kv_only(2000), form="map") as (service, publisher):
        chains = [long_keys(2000, name) for name in "ab"]
        while publisher.batches._bytes < 6 << 20:
            for chain in chains:
                await bring(service, chain)
        with zmq.asyncio.Context() as context:
            stuck = [context.socket(zmq.DEALER) for _ in range(6)]  # more than are answered at once
            for socket in stuck:
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RCVHWM, 1)
                socket.setsockopt(zmq.RCVBUF, 4096)
                socket.connect(publisher.endpoints[1])
                await socket.send_multipart([b"", bytes(8)])
            kept = await ask_again(publisher.endpoints[1], 0)
            assert [message.number for message in kept] == list(range(kept[-1].number + 1))
            for socket in stuck:
                socket.close()
