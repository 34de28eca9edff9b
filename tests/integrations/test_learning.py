"""What the SGLang adapter learns of prefixes and of the engine's room, and what it stages: without SGLang."""

import ctypes
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forestage_client.integrations._chains import Chains
from forestage_client.integrations._host_pages import BytesPage, FlatPage, RunsPage, pages_of, tensor_page
from forestage_client.integrations._host_room import HostRoom
from forestage_client.integrations._quiet_log import QuietLog
from forestage_client.integrations._sglang_settings import Rank, Settings
from forestage_client.integrations._staged_pages import StagedPages

KEYS = [f"{page:064x}" for page in range(160)]


def chains(boundaries: Sequence[int], free_pages: int = 1000) -> Chains:
    known = Chains(capacity=2)
    known.remember([f"other {page}" for page in range(3)], [3], 1000)
    known.remember(KEYS, boundaries, free_pages)
    known.check_integrity()
    return known


@pytest.mark.parametrize(
    ("start", "end", "may_go_on", "asked", "usable", "cut_at"),
    [
        (0, 128, False, 128, 128, None),  # it ends at a boundary
        (0, 100, False, 64, 64, 100),  # SGLang has cut it
        (0, 100, True, 128, 100, None),  # a batch of a longer read: the state behind it tells how far to ask
        (64, 100, True, 128, 36, None),
        (64, 128, False, 128, 64, None),
        (64, 100, False, 64, 0, 100),  # nothing within can be resumed
        (100, 150, True, 128, 28, None),  # beyond the last state there is nothing to be had
        (130, 160, True, 130, 0, None),
    ],
)
def test_how_far_to_ask(start: int, end: int, may_go_on: bool, asked: int, usable: int, cut_at: int | None) -> None:
    stretch = chains([64, 128]).stretch(KEYS[start:end], may_go_on=may_go_on)
    assert (list(stretch.keys), stretch.usable, stretch.cut_at) == (KEYS[start:asked], usable, cut_at)


def test_an_unknown_chain_is_asked_for_as_it_is() -> None:
    known = chains([64])
    for keys in (["other 1", "other 9"], ["x"], [KEYS[0], KEYS[2]]):
        assert known.stretch(keys, may_go_on=True).keys == keys
    known.remember(["new"], [1], 0)
    known.check_integrity()
    assert len(known) == 2  # the oldest is gone
    assert known.stretch(["other 0"], may_go_on=True).usable == 1
    known.forget()
    assert known.stretch(KEYS[:100], may_go_on=False).usable == 100


def test_reading_more_than_was_free_shows_that_room_was_made() -> None:
    assert chains([64, 128], free_pages=100).stretch(KEYS[:128], may_go_on=False).made_room
    assert not chains([64, 128], free_pages=100).stretch(KEYS[:64], may_go_on=False).made_room


def test_room_that_is_taken_as_it_is() -> None:
    assert HostRoom("ignore").limit(1, [64, 128], 0) is None
    assert HostRoom("free").limit(1, [64, 128], 0) == 1
    assert HostRoom("free").limit(128, [64, 128], 0) is None
    with pytest.raises(ValueError, match="host_room must be one of auto, free, ignore"):
        HostRoom("all")  # type: ignore[arg-type]


def test_room_that_is_learned() -> None:
    room = HostRoom("auto")
    assert room.limit(128, [64, 128], 0) is None  # all of it is free
    assert room.limit(100, [64, 128], 0) == 100  # 64 are certain
    assert room.limit(100, [50, 128], 0) is None  # 50 are not worth it
    assert room.limit(10, [64, 128], 0) is None
    room.was_made(1)
    assert room.limit(100, [64, 128], 60) is None
    assert room.limit(100, [64, 128], 62) == 100
    room.was_made(70)
    room.was_cut(90, 71)
    assert room.limit(20, [64, 128], 72) == 90
    assert room.limit(95, [64, 128], 72) == 95
    assert room.limit(20, [64, 128], 74) is None


def test_staged_pages() -> None:
    staged = StagedPages(10)
    assert staged.put("mamba", "a", bytearray(4))
    assert staged.put("mamba", "b", bytearray(4))
    assert staged.put("mamba", "b", bytearray(b"1234"))
    assert not staged.put("mamba", "c", bytearray(11))
    staged.check_integrity()
    assert (len(staged), staged.num_bytes) == (2, 8)
    assert staged.put("swa", "b", bytearray(5))  # the oldest makes room
    staged.check_integrity()
    assert staged.get("mamba", "a") is None
    assert bytes(staged.get("mamba", "b") or b"") == b"1234"
    staged.drop("mamba", "b")
    staged.drop("mamba", "b")
    assert (len(staged), staged.num_bytes) == (1, 5)
    staged.clear()
    staged.check_integrity()
    assert staged.num_bytes == 0


def test_a_warning_is_said_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    log = QuietLog(logging.getLogger("forestage_client.test"), every_s=10)
    for now in (0.0, 5.0, 9.9, 10.0):
        log.tell("away", now)
    log.tell("other", 5, ValueError("why"))
    assert caplog.messages == ["away", "away", "other"]
    for number in range(1000):
        log.tell(str(number), 0)
    assert len(log._said) <= 256


class HostPool:
    """A host pool of 4 pages of 2 tokens, 3 layers and 8 bytes a token and layer, as SGLang lays it out."""

    page_size = 2

    def __init__(self, layout: str) -> None:
        self.layout = layout
        shape = (2, 3, 8, 8) if layout == "layer_first" else (2, 8, 3, 8)
        self.buffer = torch.arange(2 * 3 * 8 * 8, dtype=torch.int16).view(shape)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        base, addresses = self.buffer.data_ptr(), []
        if self.layout == "side":
            raise NotImplementedError
        for index in indices.tolist()[::2]:
            if self.layout == "layer_first":
                for layer in range(3):
                    addresses += [base + (kv * 24 + layer * 8 + index) * 16 for kv in range(2)]
            else:
                addresses += [base + (kv * 24 + index * 3) * 16 for kv in range(2)]
        return addresses, [32 if self.layout == "layer_first" else 96] * len(addresses)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(2 * 3 * 2 * 8, dtype=torch.int16)

    def get_data_page(self, index: int, flat: bool) -> torch.Tensor:
        assert flat
        whole = (
            self.buffer[:, :, index : index + 2] if self.layout == "layer_first" else self.buffer[:, index : index + 2]
        )
        return whole.reshape(-1)

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.buffer[:, index : index + 2] = page.view(2, 2, 3, 8)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "side"])
@pytest.mark.parametrize("grouped", [False, True])
def test_host_pages_are_flat_pages(layout: str, grouped: bool) -> None:
    pool = HostPool(layout)
    given: Any = SimpleNamespace(anchor_entry=SimpleNamespace(host_pool=pool)) if grouped else pool
    pages = pages_of(given, torch.tensor([4, 5, 0, 1]), 2)
    assert [type(page) for page in pages] == [FlatPage if layout == "side" else RunsPage] * 2
    for page, index in zip(pages, (4, 0), strict=True):
        flat = bytearray(page.num_bytes)
        page.drain(BytesPage(flat).address())
        assert flat == pool.get_data_page(index, flat=True).numpy().tobytes()
    before = pool.get_data_page(0, flat=True).clone()
    new = bytearray(range(192))
    pages[0].fill(BytesPage(new).address())
    assert pool.get_data_page(4, flat=True).numpy().tobytes() == new
    assert torch.equal(pool.get_data_page(0, flat=True), before)


def test_pages_that_are_none() -> None:
    pool = HostPool("page_first")
    assert pages_of(pool, torch.tensor([], dtype=torch.int64), 0) == ()
    for indices in (torch.tensor([0, 1, 2]), None):
        with pytest.raises(ValueError, match="2 pages have 4 slots of SGLang's host pool, not"):
            pages_of(pool, indices, 2)
    with pytest.raises(ValueError, match="contiguous"):
        tensor_page(torch.zeros(4, 4).t())
    source = ctypes.create_string_buffer(b"abcd", 4)
    tensor = torch.zeros(4, dtype=torch.uint8)
    tensor_page(tensor).fill(ctypes.addressof(source))
    assert tensor.numpy().tobytes() == b"abcd"


def storage_config(extra: dict[str, Any] | None = None, **changes: Any) -> SimpleNamespace:
    sizes = {"tp_rank": 1, "tp_size": 2, "pp_rank": 1, "pp_size": 2, "attn_cp_rank": 1, "attn_cp_size": 3}
    values = {**sizes, "is_mla_model": False, "model_name": "acme/m", "extra_config": extra, **changes}
    return SimpleNamespace(**values)


def test_settings(tmp_path: Any) -> None:
    settings = Settings.read(storage_config())
    assert (settings.url, settings.model, settings.token) == ("http://127.0.0.1:8470", "acme/m", None)
    assert settings.rank == Rank(9, 12, 2, False)
    assert settings.read_deadline_ms(8192) == 4000
    (tmp_path / "token").write_text("secret\n")
    extra = {"endpoint": "unix:/s", "model": "m", "token_file": str(tmp_path / "token"), "read_ms": 1, "tenant": "t"}
    settings = Settings.read(storage_config({**extra, "interface_v1": 1}))
    assert (settings.url, settings.model, settings.token, settings.tenant) == ("unix:/s", "m", "secret\n", "t")


@pytest.mark.parametrize(
    ("extra", "changes", "message"),
    [
        ({"model": 3}, {}, "model must be a text"),
        ({"read_ms": "2000"}, {}, "read_ms must be a whole number"),
        ({"query_ms": -1}, {}, "query_ms must be a whole number"),
        ({"host_room": "all"}, {}, "host_room must be one of auto, free, ignore"),
        ({}, {"model_name": None}, "model must name a model"),
        ({}, {"dcp_size": 2}, "dcp_size > 1"),
    ],
)
def test_settings_that_cannot_be_meant(extra: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.read(storage_config(extra, **changes))


def test_which_shard_is_a_ranks() -> None:
    assert Rank(0, 1).shard_of(1) == 0
    assert Rank(3, 4).shard_of(4) == 3
    assert Rank(3, 4, 4, is_mla=True).shard_of(1) == 0
    assert Rank(3, 4, 4, is_mla=True).shard_of(4) == 3
    # Two pipeline stages of two ranks each: the stages have different layers.
    assert [Rank(index, 4, 2, is_mla=True).shard_of(2) for index in range(4)] == [0, 0, 1, 1]
    assert Rank(3, 4, 2, is_mla=True).shard_of(1) is None
    assert [rank.writers for rank in (Rank(3, 4, 4), Rank(3, 4, 4, True), Rank(3, 4, 2, True))] == [4, 1, 2]
    assert Rank(3, 4).shard_of(1) is None
    assert Rank(3, 4).shard_of(2) is None
