"""What every storage owes, as tests to inherit.

A subclass provides the fixture `back`: a fresh storage together with a way to its values behind its back. Values are
raw: a payload, and whatever the storage puts around it.
"""

import asyncio
import contextlib
import hashlib
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

import pytest

from contract.polling import until
from forestage.core.errors import StorageUnavailableError
from forestage.core.layout import Component, Covers, ModelLayout
from forestage.storage.base import PageRead, Presence, Probe, ReadOutcome, Storage

__all__ = [
    "CORRUPT",
    "KV",
    "LOADED",
    "MISSING",
    "STATE",
    "STOPPED",
    "Back",
    "Landing",
    "StorageContract",
    "hybrid",
    "keys",
    "payload",
    "payloads",
    "store",
]

KV, STATE = 0, 1
LOADED, MISSING, CORRUPT, STOPPED = (
    ReadOutcome.LOADED,
    ReadOutcome.MISSING,
    ReadOutcome.CORRUPT,
    ReadOutcome.STOPPED,
)


class Back(ABC):
    """A storage, and the raw values behind it."""

    storage: Storage
    #: Whether a value of the right size with wrong content is noticed.
    verifies_content = True

    @abstractmethod
    async def get(self, model: ModelLayout, component_index: int, key: bytes, shard: int) -> bytes | None:
        """Return the value as stored."""

    @abstractmethod
    async def put(self, model: ModelLayout, component_index: int, key: bytes, shard: int, value: bytes) -> None:
        """Replace the value."""

    @abstractmethod
    async def remove(self, model: ModelLayout, component_index: int, key: bytes, shard: int) -> None:
        """Remove the value."""


def hybrid(name: str = "acme/hybrid", shards: int = 2, kv_bytes: int = 4096, state_bytes: int = 1000) -> ModelLayout:
    """Return a model with attention KV and a tail state."""
    kv = Component("kv", kv_bytes, shards=shards)
    state = Component("mamba", state_bytes, shards=shards, covers=Covers.TAIL, window=1)
    return ModelLayout(name, 16, (kv, state), shards=shards)


def keys(count: int, chain: str = "a", key_bytes: int = 32) -> list[bytes]:
    """Return `count` page keys."""
    return [hashlib.sha512(f"{chain}|{page}".encode()).digest()[:key_bytes] for page in range(count)]


def payload(model: ModelLayout, component_index: int, key: bytes, shard: int) -> bytes:
    """Return bytes that no other page, component or shard has."""
    component = model.components[component_index]
    block = hashlib.sha256(f"{model.name}|{component.name}|{shard}|".encode() + key).digest()
    return (block * (component.bytes // len(block) + 1))[: component.bytes]


def payloads(model: ModelLayout, component_index: int, key: bytes) -> list[bytes]:
    return [payload(model, component_index, key, shard) for shard in range(model.components[component_index].shards)]


async def store(storage: Storage, model: ModelLayout, component_index: int, *pages: bytes) -> None:
    """Write pages with their payloads."""
    for key in pages:
        await storage.write(model, component_index, key, payloads(model, component_index, key))


class Landing:
    """Buffers for a batch of reads, with guard bytes around every view, and the reports that came."""

    GUARD = 64

    def __init__(self, model: ModelLayout, component_index: int, pages: Sequence[bytes]) -> None:
        self.model = model
        self.component_index = component_index
        component = model.components[component_index]
        self.stride = component.bytes + self.GUARD
        self.memory = bytearray(b"\xa5" * (len(pages) * component.shards * self.stride + self.GUARD))
        self.reports: list[tuple[int, ReadOutcome]] = []
        self.reads: list[PageRead] = []
        for page, key in enumerate(pages):
            starts = [(page * component.shards + shard) * self.stride + self.GUARD for shard in range(component.shards)]
            views = tuple(memoryview(self.memory)[start : start + component.bytes] for start in starts)
            self.reads.append(PageRead(component_index, key, views))

    def report(self, index: int, outcome: ReadOutcome) -> None:
        self.reports.append((index, outcome))

    async def read(self, storage: Storage) -> list[ReadOutcome]:
        """Read all; check order and number of reports, guards and what was loaded; return the outcomes."""
        await storage.read_into(self.model, self.reads, self.report)
        self.check()
        return self.outcomes()

    def outcomes(self) -> list[ReadOutcome]:
        return [outcome for _, outcome in sorted(self.reports)]

    def check(self) -> None:
        assert [index for index, _ in self.reports] == list(range(len(self.reads)))
        for start in range(0, len(self.memory), self.stride):
            assert self.memory[start : start + self.GUARD] == b"\xa5" * self.GUARD
        for index, outcome in self.reports:
            if outcome is LOADED:
                read = self.reads[index]
                assert [bytes(view) for view in read.views] == payloads(self.model, self.component_index, read.key)


async def ask(
    storage: Storage,
    model: ModelLayout,
    pages: Sequence[bytes],
    first_page: int = 0,
    first_tail: int = 0,
    known: Sequence[int] = (),
) -> Presence:
    flags = bytearray(len(pages))
    for page in known:
        flags[page] = 1
    presence = await storage.probe(model, Probe(pages, first_page, first_tail, flags))
    assert [len(mask) for mask in presence.masks] == [len(pages)] * len(model.components)
    return presence


def bits(mask: bytes | bytearray) -> str:
    return "".join(map(str, mask))


class StorageContract:
    """Inherit as `class TestX(StorageContract)`."""

    # ---- probe

    async def test_probe_tells_the_prefix_for_every_pattern(self, back: Back) -> None:
        model = hybrid()
        for present in itertools.product((0, 1), repeat=4):
            pages = keys(4, f"pattern {present}")
            await store(back.storage, model, KV, *itertools.compress(pages, present))
            mask = (await ask(back.storage, model, pages)).masks[KV]
            gap = (*present, 0).index(0)
            assert bits(mask[:gap]) == "1" * gap
            # Behind the first gap a storage may have stopped looking.
            assert all(told in {0, true} for told, true in zip(mask[gap:], present[gap:], strict=True))

    async def test_probe_wants_all_shards(self, back: Back) -> None:
        model, pages = hybrid(shards=3), keys(5)
        for shard in range(3):
            await store(back.storage, model, KV, *pages)
            await back.remove(model, KV, pages[shard + 1], shard)
            mask = (await ask(back.storage, model, pages)).masks[KV]
            assert bits(mask[: shard + 2]) == "1" * (shard + 1) + "0"

    async def test_probe_tells_tails_up_to_the_gap(self, back: Back) -> None:
        model, pages = hybrid(), keys(6)
        await store(back.storage, model, KV, *pages[:4])
        await store(back.storage, model, STATE, pages[1], pages[3], pages[5])
        await store(back.storage, model, STATE, pages[2])
        await back.remove(model, STATE, pages[2], 1)
        kv, state = (await ask(back.storage, model, pages)).masks
        assert bits(kv[:5]) == "11110"
        assert bits(state[:4]) == "0101"

    async def test_probe_asks_nothing_below_first_page_and_first_tail(self, back: Back) -> None:
        model, pages = hybrid(), keys(6)
        await store(back.storage, model, KV, *pages)
        await store(back.storage, model, STATE, *pages)
        kv, state = (await ask(back.storage, model, pages, first_page=4, first_tail=2)).masks
        assert (bits(kv), bits(state)) == ("000011", "001111")
        kv, state = (await ask(back.storage, model, pages, first_page=1, first_tail=6)).masks
        assert (bits(kv), bits(state)) == ("011111", "000000")
        await back.storage.delete(model, KV, pages[0])  # not asked for, so no gap
        kv, state = (await ask(back.storage, model, pages, first_page=1, first_tail=0)).masks
        assert (bits(kv), bits(state)) == ("011111", "111111")

    async def test_probe_goes_on_over_known_pages(self, back: Back) -> None:
        model, pages = hybrid(), keys(6)
        await store(back.storage, model, KV, pages[0], pages[3], pages[4])
        await store(back.storage, model, STATE, pages[2], pages[4])
        kv, state = (await ask(back.storage, model, pages, known=[1, 2, 3])).masks
        assert bits(kv[:5]) == "10011"
        assert bits(state[:5]) == "00101"

    async def test_probe_keeps_models_and_chains_apart(self, back: Back) -> None:
        mine, other = hybrid("acme/one"), hybrid("acme/two")
        await store(back.storage, mine, KV, *keys(3))
        assert bits((await ask(back.storage, mine, keys(3))).masks[KV]) == "111"
        assert bits((await ask(back.storage, other, keys(3))).masks[KV])[0] == "0"
        assert bits((await ask(back.storage, mine, keys(3, "b"))).masks[KV])[0] == "0"

    async def test_probe_of_nothing(self, back: Back) -> None:
        assert [bytes(mask) for mask in (await ask(back.storage, hybrid(), [])).masks] == [b"", b""]

    async def test_probe_of_many_pages(self, back: Back) -> None:
        model, pages = hybrid(shards=1, kv_bytes=64, state_bytes=64), keys(300)
        await store(back.storage, model, KV, *pages)
        await store(back.storage, model, STATE, pages[255], pages[299])
        kv, state = (await ask(back.storage, model, pages)).masks
        assert bits(kv) == "1" * 300
        assert [page for page in range(300) if state[page]] == [255, 299]

    # ---- reads

    @pytest.mark.parametrize("key_bytes", [16, 32, 64])
    async def test_what_was_written_is_read_in_order(self, back: Back, key_bytes: int) -> None:
        model, pages = hybrid(), keys(20, key_bytes=key_bytes)
        for component in (KV, STATE):
            await store(back.storage, model, component, *pages)
            assert await Landing(model, component, pages).read(back.storage) == [LOADED] * 20

    async def test_sizes(self, back: Back) -> None:
        for size in (1, 63, 4095, 4096, 4097, 65536, 262144 + 1):
            model, pages = hybrid(f"size {size}", kv_bytes=size), keys(3)
            await store(back.storage, model, KV, *pages)
            assert await Landing(model, KV, pages).read(back.storage) == [LOADED] * 3

    async def test_many_shards(self, back: Back) -> None:
        model, pages = hybrid(shards=16), keys(5)
        await store(back.storage, model, KV, *pages)
        await back.remove(model, KV, pages[3], 15)
        assert await Landing(model, KV, pages).read(back.storage) == [LOADED] * 3 + [MISSING, LOADED]

    async def test_pages_of_several_components_in_one_batch(self, back: Back) -> None:
        model, pages = hybrid(), keys(4)
        landings = [Landing(model, component, pages) for component in (KV, STATE)]
        for component in (KV, STATE):
            await store(back.storage, model, component, *pages)
        mixed = [read for pair in zip(*(landing.reads for landing in landings), strict=True) for read in pair]
        reports: list[tuple[int, ReadOutcome]] = []
        await back.storage.read_into(model, mixed, lambda index, outcome: reports.append((index, outcome)))
        assert reports == [(index, LOADED) for index in range(8)]
        for landing in landings:
            landing.reports = [(index, LOADED) for index in range(4)]
            landing.check()

    async def test_reading_nothing_reports_nothing(self, back: Back) -> None:
        landing = Landing(hybrid(), KV, [])
        assert await landing.read(back.storage) == []

    async def test_missing_pages_spoil_no_others(self, back: Back) -> None:
        model, pages = hybrid(), keys(6)
        await store(back.storage, model, KV, *pages)
        await back.storage.delete(model, KV, pages[1])
        await back.remove(model, KV, pages[4], 0)
        outcomes = await Landing(model, KV, pages).read(back.storage)
        assert outcomes == [LOADED, MISSING, LOADED, LOADED, MISSING, LOADED]

    @pytest.mark.parametrize("cut", ["empty", "one byte", "half", "one short", "one long", "twice"])
    async def test_a_value_of_another_size_is_corrupt(self, back: Back, cut: str) -> None:
        for shard in (0, 1):
            model, pages = hybrid(), keys(3, f"shard {shard}")
            await store(back.storage, model, KV, *pages)
            value = await back.get(model, KV, pages[1], shard)
            assert value is not None
            spoiled = {
                "empty": b"",
                "one byte": value[:1],
                "half": value[: len(value) // 2],
                "one short": value[:-1],
                "one long": value + b"\0",
                "twice": value * 2,
            }[cut]
            await back.put(model, KV, pages[1], shard, spoiled)
            assert await Landing(model, KV, pages).read(back.storage) == [LOADED, CORRUPT, LOADED]

    async def test_wrong_content_is_corrupt(self, back: Back) -> None:
        if not back.verifies_content:
            return
        model, pages = hybrid(state_bytes=4096), keys(9)
        for component in (KV, STATE):
            await store(back.storage, model, component, *pages)
        good = [await back.get(model, KV, key, 0) for key in pages]
        value = good[0]
        assert value is not None
        size = len(value)
        foreign = [
            value,  # another page
            await back.get(model, KV, pages[2], 1),  # another shard
            await back.get(model, STATE, pages[3], 0),  # another component
            bytes(size),
            random.Random(5).randbytes(size),
            (good[6] or b"")[:-1] + b"\xff",  # the last byte
            b"\xff" + (good[7] or b"")[1:],  # the first byte
        ]
        for page, spoiled in enumerate(foreign, start=1):
            assert spoiled is not None
            assert len(spoiled) == size
            await back.put(model, KV, pages[page], 0, spoiled)
        assert await Landing(model, KV, pages).read(back.storage) == [LOADED] + [CORRUPT] * 7 + [LOADED]

    async def test_stopped_reads_are_not_begun(self, back: Back) -> None:
        model, pages = hybrid(), keys(5)
        await store(back.storage, model, KV, *pages)
        landing = Landing(model, KV, pages)
        for index in (0, 3):
            landing.reads[index].stopped = True
        assert await landing.read(back.storage) == [STOPPED, LOADED, LOADED, STOPPED, LOADED]
        for index in (0, 3):
            assert all(bytes(view) == b"\xa5" * len(view) for view in landing.reads[index].views)

    async def test_stopping_on_the_way(self, back: Back) -> None:
        model, pages = hybrid(kv_bytes=65536), keys(40)
        await store(back.storage, model, KV, *pages)
        landing = Landing(model, KV, pages)
        collect = landing.report

        def report(index: int, outcome: ReadOutcome) -> None:
            collect(index, outcome)
            for read in landing.reads[2:]:
                read.stopped = True

        landing.report = report  # type: ignore[method-assign]
        outcomes = await landing.read(back.storage)
        assert outcomes[0] is LOADED
        assert set(outcomes) <= {LOADED, STOPPED}

    async def test_progress_rises(self, back: Back) -> None:
        model, pages = hybrid(), keys(3)
        await store(back.storage, model, KV, *pages)
        landing = Landing(model, KV, pages)
        await landing.read(back.storage)
        assert all(read.progress > 0 for read in landing.reads)

    async def test_batches_at_once(self, back: Back) -> None:
        model = hybrid(kv_bytes=16384)
        chains = [keys(20, f"chain {number}") for number in range(8)]
        for pages in chains:
            await store(back.storage, model, KV, *pages)
        landings = [Landing(model, KV, pages) for pages in chains]
        assert await asyncio.gather(*(landing.read(back.storage) for landing in landings)) == [[LOADED] * 20] * 8

    async def test_a_cancelled_read_has_let_go_of_its_buffers(self, back: Back) -> None:
        model, pages = hybrid(kv_bytes=65536), keys(60)
        await store(back.storage, model, KV, *pages)
        for begun in (0, 1, 5):
            landing = Landing(model, KV, pages)
            reading = asyncio.create_task(back.storage.read_into(model, landing.reads, landing.report))
            await asyncio.sleep(0)  # let it begin: a task cancelled before that never runs
            await until(lambda wanted=begun, landing=landing: len(landing.reports) >= wanted)  # type: ignore[misc]
            came_too_late = not reading.cancel()
            with contextlib.nullcontext() if came_too_late else pytest.raises(asyncio.CancelledError):
                await reading
            assert not (came_too_late and begun == 0)
            landing.memory[:] = b"\xee" * len(landing.memory)
            assert sorted(index for index, _ in landing.reports) == list(range(60))
            assert set(landing.outcomes()) <= {LOADED, STOPPED}
            # The next batch runs in the same threads or connections; whatever lingered would come before its end.
            assert await Landing(model, KV, pages).read(back.storage) == [LOADED] * 60
            assert landing.memory == b"\xee" * len(landing.memory)

    # ---- writes

    async def test_write_takes_any_buffer_and_replaces(self, back: Back) -> None:
        model, key = hybrid(), keys(1)[0]
        await back.storage.write(model, KV, key, [bytes(4096), bytearray(4096)])
        await back.storage.write(model, KV, key, [memoryview(shard) for shard in payloads(model, KV, key)])
        assert await Landing(model, KV, [key]).read(back.storage) == [LOADED]

    async def test_writes_at_once(self, back: Back) -> None:
        model, pages = hybrid(), keys(40)
        await asyncio.gather(*(store(back.storage, model, KV, key) for key in [*pages, *pages]))
        assert await Landing(model, KV, pages).read(back.storage) == [LOADED] * 40

    async def test_a_cancelled_write_has_let_go_of_its_buffers(self, back: Back) -> None:
        model, pages = hybrid(shards=3, kv_bytes=65536), keys(30)
        for turn, key in enumerate(pages):
            buffers = [bytearray(shard) for shard in payloads(model, KV, key)]
            writing = asyncio.create_task(back.storage.write(model, KV, key, buffers))
            for _ in range(1 + turn % 10):
                await asyncio.sleep(0.0002 * (turn // 10))
            came_too_late = not writing.cancel()
            with contextlib.nullcontext() if came_too_late else pytest.raises(asyncio.CancelledError):
                await writing
            for buffer in buffers:
                buffer[:] = b"\xee" * len(buffer)
        # What is there is whole and what it was when it was written.
        assert set(await Landing(model, KV, pages).read(back.storage)) <= {LOADED, MISSING}
        await store(back.storage, model, KV, *pages)
        assert await Landing(model, KV, pages).read(back.storage) == [LOADED] * 30

    async def test_delete_is_idempotent(self, back: Back) -> None:
        model, pages = hybrid(), keys(3)
        await store(back.storage, model, KV, *pages)
        await store(back.storage, model, STATE, pages[1])
        assert await back.storage.delete(model, KV, pages[1])
        assert not await back.storage.delete(model, KV, pages[1])
        assert not await back.storage.delete(model, KV, keys(1, "unknown")[0])
        assert bits((await ask(back.storage, model, pages)).masks[KV][:2]) == "10"
        assert await Landing(model, KV, pages).read(back.storage) == [LOADED, MISSING, LOADED]
        assert await Landing(model, STATE, pages[1:2]).read(back.storage) == [LOADED]

    async def test_delete_removes_the_rest_of_a_page(self, back: Back) -> None:
        model, key = hybrid(), keys(1)[0]
        await store(back.storage, model, KV, key)
        await back.remove(model, KV, key, 0)
        assert await back.storage.delete(model, KV, key)
        assert await back.get(model, KV, key, 1) is None

    # ---- the end

    async def test_a_closed_storage_says_so(self, back: Back) -> None:
        model, pages = hybrid(), keys(2)
        await store(back.storage, model, KV, *pages)
        await back.storage.aclose()
        await back.storage.aclose()
        with pytest.raises(StorageUnavailableError):
            await ask(back.storage, model, pages)
        assert await Landing(model, KV, pages).read(back.storage) == [ReadOutcome.UNREACHABLE] * 2
        with pytest.raises(StorageUnavailableError):
            await store(back.storage, model, KV, *pages)
        with pytest.raises(StorageUnavailableError):
            await back.storage.delete(model, KV, pages[0])
