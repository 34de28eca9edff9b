"""vLLM 0.33: its tiering manager finds what the service prefetched, and what it stores comes to the service's L3."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult

from forestage_client import Client, PoolView
from integrations.in_vllm.stage import MODEL, WAIT_S, Engine, chain, content, extra_config, write_config
from support.running import running


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def make_engine(stack: ExitStack, home: Path, rows: int = 32, groups: int = 1, **more: Any) -> Engine:
    engine = Engine(extra_config(home, rows, **more), groups)
    stack.callback(engine.close)
    return engine


def connect(stack: ExitStack, home: Path) -> Client:
    return stack.enter_context(Client(f"unix:{home}/s", timeout_s=30))


def write(home: Path, client: Client, pages: Sequence[bytes], states: Sequence[int] = ()) -> None:
    """Put pages into L3, through the pool."""
    tails = {"mamba": list(states)} if states else {}
    with (
        PoolView(f"{home}/pool", writable=True) as view,
        client.write(view, MODEL, pages, tails) as writer,
    ):
        for index, page in enumerate(pages):
            writer.put("kv", index, content(page))
        for index in states:
            writer.put("mamba", index, content(pages[index], 1))
    status = client.write_status(writer.write.id, wait_ms=20_000)
    assert status.durable == len(pages)


def fill_l3(home: Path, pages: Sequence[bytes], states: Sequence[int] = ()) -> None:
    """Leave pages in L3, and no pool."""
    with running(home / "forestage.toml") as service, Client(service.url, timeout_s=30) as client:
        write(home, client, pages, states)
        service.stop()
    (home / "pool").unlink()


def test_what_the_service_prefetched_is_a_hit(stack: ExitStack, tmp_path: Path) -> None:
    pages = chain(12)
    write_config(tmp_path)
    fill_l3(tmp_path, pages)
    stack.enter_context(running(tmp_path / "forestage.toml"))
    client = connect(stack, tmp_path)
    engine = make_engine(stack, tmp_path)
    assert engine.hits(pages) == 0

    job = client.prefetch(MODEL, pages, wait_ms=10_000)
    assert job.pages.ready == 12
    context = engine.request()
    assert set(engine.look(pages, context)) == {LookupResult.HIT_PENDING}
    engine.step()
    assert set(engine.settle(pages, context)) == {LookupResult.HIT}
    engine.finish(context)
    assert [engine.row_of(page) for page in pages] == [content(page) for page in pages]
    assert engine.hits([*pages, *chain(3, "b")]) == 12


def test_of_more_than_there_is_room_for_the_beginning_is_hit(stack: ExitStack, tmp_path: Path) -> None:
    pages = chain(12)
    write_config(tmp_path)
    stack.enter_context(running(tmp_path / "forestage.toml"))
    write(tmp_path, connect(stack, tmp_path), pages)
    engine = make_engine(stack, tmp_path, rows=8)
    context = engine.request()
    found = engine.look(pages, context)
    assert found == [LookupResult.HIT_PENDING] * 8 + [LookupResult.MISS] * 4
    engine.step()
    assert engine.settle(pages[:8], context) == [LookupResult.HIT] * 8
    engine.finish(context)


def test_what_vllm_stores_comes_to_l3(stack: ExitStack, tmp_path: Path) -> None:
    pages = chain(10)
    write_config(tmp_path)
    stack.enter_context(running(tmp_path / "forestage.toml"))
    client = connect(stack, tmp_path)
    engine = make_engine(stack, tmp_path)
    engine.store((page, 0) for page in pages)
    engine.work_off()
    found = client.lookup(MODEL, pages)
    assert (found.pages.host, found.pages.stored) == (10, 10)
    assert not engine.tier._running

    # A second engine has them at once.
    other = make_engine(stack, tmp_path)
    assert other.hits(pages) == 10
    assert [other.row_of(page) for page in pages] == [content(page) for page in pages]


def test_a_hybrid_model_has_a_component_for_each_group(stack: ExitStack, tmp_path: Path) -> None:
    pages = chain(8)
    write_config(tmp_path, state=True)
    stack.enter_context(running(tmp_path / "forestage.toml"))
    client = connect(stack, tmp_path)
    engine = make_engine(stack, tmp_path, groups=2)
    engine.store([*((page, 0) for page in pages), (pages[3], 1), (pages[7], 1)])
    engine.work_off()
    assert client.lookup(MODEL, pages).pages.restorable == 8
    assert client.lookup(MODEL, pages[:6]).pages.restorable == 4
    # A state that comes later than its page.
    engine.store([(pages[5], 1)])
    engine.work_off()
    assert client.lookup(MODEL, pages[:6]).pages.restorable == 6

    other = make_engine(stack, tmp_path, groups=2)
    assert other.hits(pages) == 8
    assert [other.hits([page], 1) for page in pages] == [0, 0, 0, 1, 0, 1, 0, 1]
    assert other.row_of(pages[7], 1) == content(pages[7], 1)


def test_a_page_that_went_after_the_lookup_is_not_loaded(stack: ExitStack, tmp_path: Path) -> None:
    pages = chain(4)
    write_config(tmp_path, slots=4)
    stack.enter_context(running(tmp_path / "forestage.toml"))
    client = connect(stack, tmp_path)
    write(tmp_path, client, pages)
    engine = make_engine(stack, tmp_path)
    context = engine.request()
    assert set(engine.look(pages, context)) == {LookupResult.HIT_PENDING}
    write(tmp_path, client, chain(2, "b"))  # takes the place of the two deepest
    engine.step()
    assert engine.settle(pages, context) == [LookupResult.HIT] * 2 + [LookupResult.MISS] * 2
    engine.finish(context)
    assert [engine.row_of(page) for page in pages[:2]] == [content(page) for page in pages[:2]]


def test_the_engine_starts_first_and_the_service_is_killed_and_comes_back(stack: ExitStack, tmp_path: Path) -> None:
    pages = chain(6)
    config = write_config(tmp_path)
    engine = make_engine(stack, tmp_path)
    assert engine.hits(pages) == 0
    engine.store((page, 0) for page in pages)
    engine.work_off()

    with running(config) as service, Client(service.url, timeout_s=30) as client:
        write(tmp_path, client, pages[:4])
        other = make_engine(stack, tmp_path)
        assert other.hits(pages) == 4
        service.process.kill()
        service.process.wait(20)
    # Nobody answers, but the pool lies there.
    assert make_engine(stack, tmp_path).hits(pages) == 4
    began = time.monotonic()
    other.store((page, 0) for page in chain(3, "b"))
    other.work_off()
    assert time.monotonic() - began < 10

    with running(config), Client(f"unix:{tmp_path}/s", timeout_s=30) as client:
        deadline = time.monotonic() + WAIT_S
        for attempt in range(10_000):
            more = chain(2, f"c{attempt}")
            other.store((page, 0) for page in more)
            other.work_off()
            if client.lookup(MODEL, more).pages.host == 2:
                break
            assert time.monotonic() < deadline
        assert make_engine(stack, tmp_path).hits(more) == 2


def test_lookups_and_loads_do_not_wait_for_a_service_that_hangs(stack: ExitStack, tmp_path: Path) -> None:
    pages = chain(8)
    write_config(tmp_path)
    service = stack.enter_context(running(tmp_path / "forestage.toml"))
    write(tmp_path, connect(stack, tmp_path), pages)
    engine = make_engine(stack, tmp_path, timeout_ms=500)
    os.kill(service.process.pid, signal.SIGSTOP)
    try:
        assert engine.hits(pages) == 8
        assert [engine.row_of(page) for page in pages] == [content(page) for page in pages]
        engine.store((page, 0) for page in chain(4, "b"))
        engine.store((page, 0) for page in chain(4, "c"))
        # What vLLM does before it sleeps or takes new weights: it must get back, with no job left.
        with engine.manager.lock:
            engine.manager.reset_cache()
            engine.manager.on_reset_flushed()
        assert not engine.tier._running
    finally:
        os.kill(service.process.pid, signal.SIGCONT)


def test_drain_waits_for_loads(stack: ExitStack, tmp_path: Path) -> None:
    pages = chain(30)
    write_config(tmp_path)
    stack.enter_context(running(tmp_path / "forestage.toml"))
    write(tmp_path, connect(stack, tmp_path), pages)
    engine = make_engine(stack, tmp_path)
    context = engine.request()
    engine.look(pages, context)
    engine.step()
    with engine.manager.lock:
        engine.tier.drain_jobs()
        results = list(engine.tier.get_finished_jobs())
    assert [result.success for result in results] == [True]
    # Given back by hand what was taken by hand, so that the manager can go on.
    engine.tier._finished.put(results[0])
    assert engine.settle(pages, context) == [LookupResult.HIT] * 30


def test_another_model_than_vllms_is_never_hit(stack: ExitStack, tmp_path: Path) -> None:
    pages = chain(4)
    write_config(tmp_path)
    stack.enter_context(running(tmp_path / "forestage.toml"))
    write(tmp_path, connect(stack, tmp_path), pages)
    for more in ({"model": "other"}, {"components": ["mamba"]}):
        engine = make_engine(stack, tmp_path, **more)
        assert engine.hits(pages) == 0
        engine.store([(pages[0], 0)])
        engine.work_off()
    assert make_engine(stack, tmp_path, groups=2).hits(pages) == 0
    assert make_engine(stack, tmp_path, model=MODEL, components=["kv"]).hits(pages) == 4


def test_stores_can_be_left_out(stack: ExitStack, tmp_path: Path) -> None:
    pages = chain(4)
    write_config(tmp_path)
    stack.enter_context(running(tmp_path / "forestage.toml"))
    engine = make_engine(stack, tmp_path, store=False)
    engine.store((page, 0) for page in pages)
    engine.work_off()
    assert connect(stack, tmp_path).lookup(MODEL, pages).pages.stored == 0


def test_settings_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    for more, words in (({"urll": ""}, "urll"), ({"url": "ftp://x"}, "url"), ({"locality": "NEAR"}, "NEAR")):
        with pytest.raises((TypeError, ValueError), match=words):
            Engine(extra_config(tmp_path, 4, **more))
