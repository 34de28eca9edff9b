"""Pages through the adapter into SGLang's host pools and back, beside SGLang's file backend on the same directory."""

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransfer

from integrations.in_sglang.host_pools import LAYOUTS, StatePool, kv_page_bytes, make_kv_pool
from integrations.in_sglang.loading import VERSION
from integrations.in_sglang.stage import file_backend, hashes_of, make_backend, set_up, slots_of
from support.running import Running, running

KEYS = hashes_of(list(range(10 * 16)))
STATE_BYTES = 1000
WAIT_S = 20.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def open_backend(stack: ExitStack, home: Path, pool: Any, **more: Any) -> Any:
    backend = make_backend(home, **more)
    stack.callback(backend.close)
    backend.register_mem_pool_host(pool)
    backend.register_mem_host_pool_v2(pool, PoolName.KV)
    return backend


def flat(pool: Any, page: int) -> torch.Tensor:
    return pool.get_data_page(page * 16, flat=True).view(torch.int16).clone()


def serve(stack: ExitStack, home: Path, state_bytes: int = 0) -> Running:
    return stack.enter_context(running(set_up(home, kv_page_bytes(), state_bytes)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_sglang_wrote_is_read(stack: ExitStack, tmp_path: Path, layout: str) -> None:
    source, target = make_kv_pool(layout, 12), make_kv_pool(layout, 12)
    serve(stack, tmp_path)
    files = file_backend(tmp_path)
    assert files.batch_set(KEYS[:8], [source.get_data_page(page * 16, flat=True) for page in range(8)])
    backend = open_backend(stack, tmp_path, target)
    assert isinstance(backend, HiCacheStorage)
    assert backend.batch_exists(KEYS) == 8
    assert [backend.exists(key) for key in (KEYS[7], KEYS[8])] == [True, False]
    # Into other slots than those they came from.
    places = [11, 3, 4, 5, 0, 1, 2, 7, 8, 9]
    before = [flat(target, page) for page in range(12)]
    assert backend.batch_get_v1(KEYS, slots_of(places)) == [True] * 8 + [False] * 2
    for page in range(12):
        expected = flat(source, places.index(page)) if page in places[:8] else before[page]
        assert torch.equal(flat(target, page), expected), page
    # The way of pages as flat tensors, which SGLang goes without `interface_v1`.
    tensors = [target.get_dummy_flat_data_page() for _ in range(3)]
    assert backend.batch_get(KEYS[6:9], tensors)[2] is None
    for tensor, page in zip(tensors[:2], (6, 7), strict=True):
        assert torch.equal(tensor.view(torch.int16), flat(source, page))
    assert backend.get(KEYS[0], tensors[0]) is tensors[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_adapter_writes_is_read_by_sglang(stack: ExitStack, tmp_path: Path, layout: str) -> None:
    source = make_kv_pool(layout, 12)
    serve(stack, tmp_path)
    backend, files = open_backend(stack, tmp_path, source), file_backend(tmp_path)
    assert backend.batch_set_v1(KEYS[:6], slots_of(list(range(5, 11)))) == [True] * 6
    assert backend.batch_exists(KEYS) == 6  # before L3 has them
    assert backend.batch_set(KEYS[6:8], [source.get_data_page(page * 16, flat=True) for page in (0, 1)])
    assert backend.set(KEYS[8], source.get_data_page(32, flat=True))
    until(lambda: files.batch_exists(KEYS) == 9)
    for page, place in enumerate([*range(5, 11), 0, 1, 2]):
        read = files.get(KEYS[page], source.get_dummy_flat_data_page())
        assert read is not None
        assert torch.equal(read.view(torch.int16), flat(source, place))
    assert backend.batch_set_v1(KEYS[:6], slots_of(list(range(5, 11)))) == [True] * 6  # they are there already
    assert backend.batch_set_v1(KEYS[:6], slots_of([1])) == [False] * 6


def test_states_go_with_their_pages(stack: ExitStack, tmp_path: Path) -> None:
    source, target = make_kv_pool("page_first", 12), make_kv_pool("page_first", 12)
    states, restored = StatePool(4, STATE_BYTES), StatePool(4, STATE_BYTES)
    serve(stack, tmp_path, STATE_BYTES)
    writer = open_backend(stack, tmp_path, source)
    writer.register_mem_host_pool_v2(states, PoolName.MAMBA)

    def state(keys: list[str] | None, slots: list[int] | None) -> PoolTransfer:
        indices = None if slots is None else torch.tensor(slots)
        return PoolTransfer(
            name=PoolName.MAMBA, keys=keys, host_indices=indices, hit_policy=PoolHitPolicy.TRAILING_PAGES
        )

    for page, slot in ((3, 2), (7, 1)):  # a state after 4 pages and one after 8
        assert writer.batch_set_v2([state([KEYS[page]], [slot])]) == {"mamba": [True]}
        assert writer.batch_set_v1(KEYS[page - 3 : page + 1], slots_of(list(range(page - 3, page + 1)))) == [True] * 4
    assert writer.batch_set_v1(KEYS[8:], slots_of([8, 9])) == [True] * 2
    files = file_backend(tmp_path)
    until(lambda: files.batch_exists(KEYS) == 10 and files.exists(f"{KEYS[7]}.mamba"))

    reader = open_backend(stack, tmp_path, target)
    reader.register_mem_host_pool_v2(restored, PoolName.MAMBA)
    found = reader.batch_exists_v2(KEYS, [state(None, None)])
    assert (found.kv_hit_pages, dict(found.extra_pool_hit_pages)) == (8, {"kv": 10, "mamba": 8})
    own = files.batch_exists_v2(KEYS, [state(None, None)])
    assert (own.kv_hit_pages, dict(own.extra_pool_hit_pages)) == (8, {"kv": 10, "mamba": 8})
    if VERSION != "0.5.13":
        assert found.restorable_prefix_pages == own.restorable_prefix_pages == [4, 8]
    assert reader.batch_get_v1(KEYS[:8], slots_of(list(range(8)))) == [True] * 8
    assert all(torch.equal(flat(target, page), flat(source, page)) for page in range(8))
    assert reader.batch_get_v2([state([KEYS[7]], [0]), state([KEYS[8]], [1])]) == {"mamba": [False]}
    assert reader.batch_get_v2([state([KEYS[7]], [3])]) == {"mamba": [True]}
    assert reader.batch_get_v2([state([KEYS[3]], [0])]) == {"mamba": [True]}
    assert torch.equal(restored.states[3], states.states[1])
    assert torch.equal(restored.states[0], states.states[2])
    # Cut by SGLang to 6 pages: only 4 can be resumed, and no other page is read.
    assert reader.batch_get_v1(KEYS[:6], slots_of(list(range(6)))) == [True] * 4 + [False] * 2
    assert [reader.exists(f"{KEYS[page]}.mamba") for page in (3, 4)] == [True, False]
    tensor = restored.get_dummy_flat_data_page()
    assert reader.get(f"{KEYS[3]}.mamba", tensor) is tensor
    assert torch.equal(tensor, states.states[2])
    # A pool that the service's model does not have keeps SGLang from restoring anything.
    unknown = PoolTransfer(name=PoolName.SWA, keys=KEYS[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert reader.batch_exists_v2(KEYS, [unknown]).kv_hit_pages == 0


def test_each_rank_reads_its_own_shard(stack: ExitStack, tmp_path: Path) -> None:
    stack.enter_context(running(set_up(tmp_path, kv_page_bytes(), ranks=2)))
    sources = [make_kv_pool("page_first", 8) for _ in range(2)]
    for rank, source in enumerate(sources):
        pages = [source.get_data_page(page * 16, flat=True) for page in range(5 - rank)]
        assert file_backend(tmp_path, rank, 2).batch_set(KEYS[: len(pages)], pages)
    for rank, source in enumerate(sources):
        target = make_kv_pool("layer_first", 8)
        backend = open_backend(stack, tmp_path, target, rank=rank, ranks=2)
        assert backend.batch_exists(KEYS) == 4  # what all ranks have
        assert backend.batch_get_v1(KEYS[:5], slots_of(list(range(5)))) == [True] * 4 + [False]
        same = make_kv_pool("page_first", 8)
        for page in range(4):
            same.set_from_flat_data_page(page * 16, target.get_data_page(page * 16, flat=True))
            assert target.get_data_page(page * 16, flat=True).numel() == source.get_data_page(page * 16).numel()
            assert torch.equal(flat(target, page), flat(source, page))
    alone = open_backend(stack, tmp_path, sources[0])
    assert alone.batch_get_v1(KEYS[:2], slots_of([0, 1])) == [False] * 2  # laid out for two ranks


def test_the_ranks_write_pages_together(stack: ExitStack, tmp_path: Path) -> None:
    stack.enter_context(running(set_up(tmp_path, kv_page_bytes(), STATE_BYTES, ranks=2)))
    sources = [make_kv_pool(layout, 12) for layout in ("page_first", "layer_first")]
    states = [StatePool(4, STATE_BYTES) for _ in range(2)]
    ranks = [open_backend(stack, tmp_path, source, rank=rank, ranks=2) for rank, source in enumerate(sources)]

    def state(key: str, slot: int) -> PoolTransfer:
        indices = torch.tensor([slot])
        return PoolTransfer(
            name=PoolName.MAMBA, keys=[key], host_indices=indices, hit_policy=PoolHitPolicy.TRAILING_PAGES
        )

    for rank, pool in zip(ranks, states, strict=True):
        rank.register_mem_host_pool_v2(pool, PoolName.MAMBA)
        assert rank.batch_set_v2([state(KEYS[3], 2)]) == {"mamba": [True]}
    # The first rank's part alone is no page.
    assert ranks[0].batch_set_v1(KEYS[:4], slots_of([5, 6, 7, 8])) == [True] * 4
    assert ranks[1].batch_exists(KEYS) == 0
    assert ranks[1].batch_set_v1(KEYS[:4], slots_of([1, 2, 3, 4])) == [True] * 4
    assert [rank.batch_exists(KEYS) for rank in ranks] == [4, 4]

    # Both at once, in several calls, as SGLang's threads make them.
    def write_rest(rank: int) -> bool:
        calls = []
        for first, last in ((4, 7), (7, 10)):
            if last == 10:
                assert ranks[rank].batch_set_v2([state(KEYS[9], 3)]) == {"mamba": [True]}
            calls += ranks[rank].batch_set_v1(KEYS[first:last], slots_of(list(range(first - rank, last - rank))))
        return calls == [True] * 6

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(write_rest, range(2))) == [True, True]
    assert [rank.batch_exists(KEYS) for rank in ranks] == [10, 10]

    def all_there(files: Any) -> bool:
        return bool(files.batch_exists(KEYS) == 10 and files.exists(f"{KEYS[9]}.mamba"))

    # SGLang's own backend finds each rank's bytes under its name.
    places = [[5, 6, 7, 8, *range(4, 10)], [1, 2, 3, 4, *range(3, 9)]]
    for rank, source in enumerate(sources):
        files = file_backend(tmp_path, rank, 2)
        until(partial(all_there, files))
        for key, place in zip(KEYS, places[rank], strict=True):
            read = files.get(key, source.get_dummy_flat_data_page())
            assert read is not None
            assert torch.equal(read.view(torch.int16), flat(source, place))
        for key, slot in ((KEYS[3], 2), (KEYS[9], 3)):
            read = files.get(f"{key}.mamba", states[rank].get_dummy_flat_data_page())
            assert torch.equal(read, states[rank].states[slot])
    assert ranks[0].batch_set_v1(KEYS, slots_of(list(range(10)))) == [True] * 10  # all there: nobody to wait for


def test_a_rank_that_writes_no_page_of_the_others_keeps_nothing_from_them(stack: ExitStack, tmp_path: Path) -> None:
    stack.enter_context(running(set_up(tmp_path, kv_page_bytes(), ranks=2)))
    source = make_kv_pool("page_first", 12)
    ranks = [open_backend(stack, tmp_path, source, rank=rank, ranks=2) for rank in range(2)]
    assert ranks[0].batch_set_v1(KEYS[:4], slots_of(list(range(4)))) == [True] * 4
    # The same part twice, as by another engine with the same prompt: it is being written already.
    twin = open_backend(stack, tmp_path, source, rank=0, ranks=2)
    assert twin.batch_set_v1(KEYS[:4], slots_of(list(range(4)))) == [False] * 4
    # Other pages than rank 0's, of which it never writes its part.
    assert ranks[1].batch_set_v1(KEYS[4:8], slots_of(list(range(4)))) == [True] * 4
    assert ranks[1].batch_exists(KEYS) == 0
    assert ranks[1].batch_set_v1(KEYS[:4], slots_of(list(range(4)))) == [True] * 4
    assert ranks[1].batch_exists(KEYS) == 4


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_service_that_goes_and_comes_back(stack: ExitStack, tmp_path: Path, signum: int) -> None:
    source, target = make_kv_pool("page_first", 12), make_kv_pool("page_first", 12)
    config = set_up(tmp_path, kv_page_bytes())
    backend = open_backend(stack, tmp_path, target)
    places = slots_of(list(range(8)))

    def misses() -> None:
        """Everything is a miss, and soon."""
        began = time.monotonic()
        assert backend.batch_exists(KEYS) == 0
        assert backend.batch_exists_v2(KEYS, []).kv_hit_pages == 0
        assert not backend.exists(KEYS[0])
        assert backend.batch_get_v1(KEYS[:8], places) == [False] * 8
        assert backend.batch_get(KEYS[:1], [target.get_dummy_flat_data_page()]) == [None]
        assert backend.batch_get_v2([PoolTransfer(PoolName.KV, places, None, KEYS[:8])]) == {"kv": [False] * 8}
        assert backend.batch_set_v1(KEYS[:8], places) == [False] * 8
        assert backend.batch_set_v2([PoolTransfer(PoolName.KV, places, None, KEYS[:8])]) == {"kv": [False] * 8}
        assert not backend.batch_set(KEYS[:1], [source.get_data_page(0, flat=True)])
        assert time.monotonic() - began < 10

    misses()  # it was never there
    with running(config) as service:
        files = file_backend(tmp_path)
        assert files.batch_set(KEYS[:8], [source.get_data_page(page * 16, flat=True) for page in range(8)])
        until(lambda: backend.batch_get_v1(KEYS[:8], places) == [True] * 8)
        service.stop(signum)
    misses()
    before = [flat(target, page) for page in range(8)]
    assert all(torch.equal(before[page], flat(source, page)) for page in range(8))
    with running(config):
        target.kv_buffer.zero_()
        until(lambda: backend.batch_exists(KEYS) == 8)
        assert backend.batch_get_v1(KEYS[:8], places) == [True] * 8
        assert all(torch.equal(flat(target, page), before[page]) for page in range(8))
    # With another layout the pool is another file, and what the adapter has mapped is nobody's.
    with running(set_up(tmp_path, kv_page_bytes(), STATE_BYTES)):
        assert files.set(f"{KEYS[7]}.mamba", torch.zeros(STATE_BYTES, dtype=torch.uint8))
        until(lambda: backend.batch_exists(KEYS) == 8)
        target.kv_buffer.zero_()
        assert backend.batch_get_v1(KEYS[:8], places) == [True] * 8
        assert all(torch.equal(flat(target, page), before[page]) for page in range(8))
    backend.close()
    misses()


def test_what_cannot_be_is_a_miss(stack: ExitStack, tmp_path: Path) -> None:
    stack.enter_context(running(set_up(tmp_path, kv_page_bytes() + 64)))
    pool = make_kv_pool("page_first", 4)
    backend = open_backend(stack, tmp_path, pool)
    (tmp_path / "l3" / f"{KEYS[0]}_acme-tiny_0_1.bin").write_bytes(bytes(kv_page_bytes() + 64))
    assert backend.batch_exists(KEYS) == 1
    assert backend.batch_get_v1(KEYS[:1], slots_of([0])) == [False]
    assert backend.batch_set_v1(KEYS[1:2], slots_of([0])) == [False]
    assert backend.batch_get_v1([], slots_of([])) == []
    assert backend.batch_exists(["not hex"]) == 0
    assert backend.batch_get_v2([PoolTransfer(PoolName.SWA, torch.tensor([1]), None, KEYS[:1])]) == {"swa": [False]}
    assert backend.get_stats() is None
    backend.clear()
    assert backend.batch_exists(KEYS) == 1  # shared pages are not this engine's to drop
    with pytest.raises(ValueError, match="host_room"):
        make_backend(tmp_path, host_room="all")
