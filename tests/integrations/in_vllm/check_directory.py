"""vLLM 0.33: its fs tier and the service read each other's pages in one directory."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from forestage_client import Client, PoolView
from integrations.in_vllm.stage import MODEL, Engine, chain, content, write_config
from support.running import running

PAGES = chain(10)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def fs_engine(stack: ExitStack, home: Path, groups: int = 1) -> Engine:
    """Return an engine with vLLM's own fs tier."""
    tier = {"type": "fs", "root_dir": f"{home}/kv", "n_read_threads": 2, "n_write_threads": 2}
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 32 * 16384, "secondary_tiers": [tier]}
    engine = Engine(extra, groups)
    stack.callback(engine.close)
    return engine


def service_over(stack: ExitStack, home: Path, engine: Engine, *, state: bool = False) -> Client:
    """Start a service over the directory of the engine."""
    mapper = engine.tier.file_mapper
    folder = f"{Path(mapper.base_path).name}_r{mapper.rank}"
    storage = f'kind = "vllm-file"\n[storage.vllm-file]\nroot = "{home}/kv"'
    config = write_config(home, state=state, storage=storage, model=f'vllm = {{ folder = "{folder}" }}')
    service = stack.enter_context(running(config))
    return stack.enter_context(Client(service.url, timeout_s=30))


def test_what_vllm_wrote_can_be_prefetched(stack: ExitStack, tmp_path: Path) -> None:
    engine = fs_engine(stack, tmp_path, groups=2)
    engine.store([*((page, 0) for page in PAGES), (PAGES[3], 1), (PAGES[7], 1)])
    engine.work_off()
    client = service_over(stack, tmp_path, engine, state=True)
    job = client.prefetch(MODEL, PAGES, wait_ms=10_000)
    assert (job.pages.stored, job.pages.ready, dict(job.shortfall)) == (10, 8, {"no_boundary": 2})
    with PoolView(client.pool().path) as view:
        got = [view.copy(MODEL, "kv", slot, page) for slot, page in zip(job.slots["kv"], PAGES, strict=False)]
        state = view.copy(MODEL, "mamba", job.slots["mamba"][0], PAGES[7])
    assert got == [content(page) for page in PAGES[:8]]
    assert state == content(PAGES[7], 1)


def test_what_the_service_wrote_is_a_hit_of_vllms(stack: ExitStack, tmp_path: Path) -> None:
    engine = fs_engine(stack, tmp_path)
    client = service_over(stack, tmp_path, engine)
    with (
        PoolView(client.pool().path, writable=True) as view,
        client.write(view, MODEL, PAGES) as writer,
    ):
        for index, page in enumerate(PAGES):
            writer.put("kv", index, content(page))
    assert client.write_status(writer.write.id, wait_ms=20_000).durable == 10
    assert engine.hits([*PAGES, *chain(2, "b")]) == 10
    assert [engine.row_of(page) for page in PAGES] == [content(page) for page in PAGES]
