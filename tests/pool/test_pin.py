"""Pinning: what was achieved is what is said, and half of it is nothing."""

import json
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.core.errors import StartError
from forestage.core.geometry import HEADER_BYTES, Geometry, lay_out
from forestage.core.layout import Component, ModelLayout
from forestage.pool import libc
from forestage.pool.file import PoolFile, PoolSettings
from forestage.pool.header import READY, encode_header
from forestage.pool.pin import GPU_NODES, PinFailedError, TorchCuda, pin_chunks, pin_memory
from forestage_client._pool_format import pin_chunks as reader_chunks
from forestage_client._pool_format import read_head
from pool.conftest import Launcher, end_of
from pool.pages import DEMO

PAGE = mmap.PAGESIZE


class Registry:
    """Stands in for the CUDA runtime, which needs a GPU: remembers what is registered and refuses the nth piece."""

    def __init__(self, refuse: int = -1) -> None:
        self.registered: dict[int, int] = {}
        self.calls = 0
        self.cleared = 0
        self.refuse = refuse

    def register(self, address: int, size: int) -> str | None:
        self.calls += 1
        if self.calls - 1 == self.refuse:
            return "CUDA error 2: out of memory"
        assert address not in self.registered
        self.registered[address] = size
        return None

    def unregister(self, address: int) -> str | None:
        return None if self.registered.pop(address, None) else "CUDA error 713: not registered"

    def clear_error(self) -> None:
        self.cleared += 1


@pytest.fixture
def memory() -> Iterator[int]:
    mapping = mmap.mmap(-1, 8 * PAGE)
    yield libc.address_of(mapping)
    mapping.close()


def locked_bytes() -> int:
    return int(re.findall(r"VmLck:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024


PIECES = [(0, 2 * PAGE), (2 * PAGE, 5 * PAGE), (7 * PAGE, PAGE)]


def test_all_pieces_are_registered_and_given_back(memory: int) -> None:
    registry = Registry()
    pinned = pin_memory(memory, PIECES, "cuda", load_cuda=lambda: registry)
    assert pinned.how == "cuda"
    assert registry.registered == {memory + offset: length for offset, length in PIECES}
    pinned.release()
    assert registry.registered == {}
    assert registry.cleared == 0


@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_refused_piece_undoes_the_others_and_clears_the_error(memory: int, nth: int) -> None:
    registry = Registry(refuse=nth)
    with pytest.raises(StartError, match=r"^pool\.pin: cuda was asked for and failed: .*CUDA error 2"):
        pin_memory(memory, PIECES, "cuda", load_cuda=lambda: registry)
    assert registry.registered == {}
    assert (registry.calls, registry.cleared) == (nth + 1, 1)


def test_auto_falls_back_and_says_what_it_got(memory: int) -> None:
    registry = Registry(refuse=1)
    before = locked_bytes()
    pinned = pin_memory(memory, PIECES, "auto", load_cuda=lambda: registry, gpu_nodes=["/dev/null"])
    assert registry.calls == 2
    assert registry.registered == {}
    assert pinned.how == "mlock"
    assert locked_bytes() == before + 8 * PAGE
    pinned.release()
    assert locked_bytes() == before


def test_cuda_is_not_touched_without_a_gpu_or_against_the_setting(memory: int) -> None:
    def load() -> Registry:
        raise AssertionError("not asked for")

    pin_memory(memory, PIECES, "auto", load_cuda=load, gpu_nodes=["/dev/no such node"]).release()
    pin_memory(memory, PIECES, "mlock", load_cuda=load, gpu_nodes=["/dev/null"]).release()
    pinned = pin_memory(memory, PIECES, "none", load_cuda=load, gpu_nodes=["/dev/null"])
    assert pinned.how == "none"
    pinned.release()


def test_memory_that_cannot_be_locked_whole_is_not_locked_at_all(memory: int) -> None:
    before = locked_bytes()
    # The last piece ends behind the mapping: in the guard page of nothing.
    pieces = [(0, 8 * PAGE), (1 << 46, PAGE)]
    assert pin_memory(memory, pieces, "auto", gpu_nodes=[]).how == "none"
    assert locked_bytes() == before
    with pytest.raises(StartError, match=r"^pool\.pin: need 36\.0 KiB of locked memory"):
        pin_memory(memory, pieces, "mlock")
    assert locked_bytes() == before


@pytest.mark.skipif(any(Path(node).exists() for node in GPU_NODES), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_reports_honestly(shm: Path) -> None:
    with pytest.raises(PinFailedError):
        TorchCuda()
    with pytest.raises(StartError, match=r"^pool\.pin: cuda was asked for and failed"):
        PoolFile.create(PoolSettings(str(shm / "pool"), 4 << 20, pin="cuda"), (DEMO,))
    assert list(shm.iterdir()) == []
    before = locked_bytes()
    pool = PoolFile.create(PoolSettings(str(shm / "pool"), 4 << 20, pin="auto"), (DEMO,))
    assert pool.pinned == ("mlock" if locked_bytes() == before + pool.size else "none")
    pool.close()
    assert locked_bytes() == before


def test_torch_is_loaded_by_nothing_but_the_wish_to_pin_with_cuda(shm: Path, launch: Launcher) -> None:
    for word in ("none", "mlock"):
        scene = {"path": str(shm / "pool"), "bytes": 1 << 20, "pin": word}
        status, out, _ = end_of(launch("owner_process", json.dumps(scene)))
        assert (status, json.loads(out)["torch"]) == (0, False)


@given(
    st.lists(st.tuples(st.integers(1, 30_000), st.integers(1, 3), st.integers(1, 30)), min_size=1, max_size=4),
    st.integers(4096, 300_000),
)
def test_pieces_cover_the_file_and_cut_no_slot(shapes: list[tuple[int, int, int]], limit: int) -> None:
    components = tuple(Component(f"c{i}", size, shards, slots=slots) for i, (size, shards, slots) in enumerate(shapes))
    geometry: Geometry = lay_out((ModelLayout("m", 1, components),), 1 << 30)
    pieces = pin_chunks(geometry.regions, geometry.used_bytes, limit)
    head = encode_header(geometry, instance=bytes(16), generation=1, file_bytes=geometry.used_bytes, state=READY)
    assert reader_chunks(read_head(head).regions, geometry.used_bytes, limit) == pieces
    at = 0
    for offset, length in pieces:
        assert offset == at
        assert offset % PAGE == 0
        assert length > 0
        at += length
    assert at == geometry.used_bytes
    cuts = {offset for offset, _ in pieces} - {0}
    for region in geometry.regions:
        size = region.component.slot_bytes
        for cut in cuts:
            if region.offset < cut < region.offset + region.data_bytes:
                assert (cut - region.offset) % size == 0
    # As large as the limit allows: only a run of slots that has to end on a page may exceed it.
    slack = max(region.component.slot_bytes for region in geometry.regions) * PAGE
    assert all(length <= max(limit, slack, HEADER_BYTES) for _, length in pieces)
