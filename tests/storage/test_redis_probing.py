"""What a probe asks of Redis, and how the answers become masks."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from contract.storage_contract import KV, STATE, hybrid, keys
from forestage.core.layout import Component, Covers, ModelLayout
from forestage.storage.base import Probe
from forestage.storage.presence import walk
from forestage.storage.redis.names import OwnNames
from forestage.storage.redis.probing import ProbeBlock, probe_blocks


def block_of(model: ModelLayout, probe: Probe) -> ProbeBlock:
    """Return the one block of a small probe."""
    (block,) = probe_blocks(model, probe, OwnNames("p").of(model))
    return block


def answer(model: ModelLayout, probe: Probe, exists: Callable[[bytes], bool]) -> list[bytearray]:
    """Carry out a probe."""
    masks = [bytearray(len(probe.keys)) for _ in model.components]
    for block in probe_blocks(model, probe, OwnNames("p").of(model)):
        block.enter(masks, bytes(map(exists, block.names)))
        gap = block.first_gap(model, probe, masks)
        if gap is not None:
            for mask in masks:
                mask[gap:] = bytes(len(mask) - gap)
            break
    return masks


def test_names_are_as_documented() -> None:
    model, (key,) = hybrid(), keys(1)
    fingerprint = model.fingerprint.encode()
    assert block_of(model, Probe([key], 0, 0, bytes(1))).names == [
        b"p:%b:%b:%d:%b" % (fingerprint, component, shard, key) for component in (b"kv", b"mamba") for shard in (0, 1)
    ]


def test_nothing_is_asked_below_where_asking_begins() -> None:
    model, pages = hybrid(shards=1), keys(5)
    heads = [shards[0].head for shards in OwnNames("p").of(model)]
    asked = block_of(model, Probe(pages, 3, 4, bytes(5))).names
    assert asked == [heads[KV] + pages[3], heads[KV] + pages[4], heads[STATE] + pages[4]]
    assert list(probe_blocks(model, Probe(pages, 5, 5, bytes(5)), OwnNames("p").of(model))) == []


def test_a_model_with_two_tails_and_an_indexer() -> None:
    pages = keys(3)
    kv, other = Component("kv", 64), Component("indexer", 64, shards=2)
    window = Component("window", 64, covers=Covers.TAIL, window=2)
    model = ModelLayout("acme/many", 16, (window, kv, other))
    lacking = OwnNames("p").of(model)[2][1].head + pages[2]
    masks = answer(model, Probe(pages, 0, 0, bytes(3)), lambda name: name != lacking)
    assert [list(mask) for mask in masks] == [[1, 1, 0], [1, 1, 0], [1, 1, 0]]


def test_long_probes_are_asked_in_blocks_up_to_the_gap() -> None:
    model, pages = hybrid(shards=1), keys(20_000)
    probe = Probe(pages, 0, 0, bytes(20_000))
    blocks = list(probe_blocks(model, probe, OwnNames("p").of(model)))
    assert [(block.begin, block.end) for block in blocks] == [
        (begin, min(begin + 4096, 20_000)) for begin in range(0, 20_000, 4096)
    ]
    asked: list[bytes] = []

    def exists(name: bytes) -> bool:
        asked.append(name)
        return not name.endswith(pages[5000])

    kv, state = answer(model, probe, exists)
    assert (kv.find(0), state.find(0)) == (5000, 5000)
    assert not any(kv[5000:])
    assert not any(state[5000:])
    assert len(asked) == 2 * 8192


@settings(deadline=None)
@given(data=st.data())
def test_masks_agree_with_asking_key_by_key(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 8))
    model, pages = hybrid(shards=data.draw(st.integers(1, 3))), keys(count)
    first_page, first_tail = (data.draw(st.integers(0, count)) for _ in range(2))
    known = bytes(data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
    probe = Probe(pages, first_page, first_tail, known)
    names = OwnNames("p").of(model)
    there = {
        shard.head + page for shards in names for shard in shards for page in pages if data.draw(st.integers(0, 3))
    }

    def holds(component_index: int, key: bytes) -> bool:
        return all(shard.head + key in there for shard in names[component_index])

    found, wanted = answer(model, probe, there.__contains__), walk(model, probe, holds)
    gap = next((page for page in range(first_page, count) if not (known[page] or wanted.masks[KV][page])), count)
    assert [bytes(mask[:gap]) for mask in found] == [bytes(mask[:gap]) for mask in wanted.masks]
    assert not any(any(mask[gap:]) for mask in found)
    assert not any(found[KV][:first_page])
    assert not any(found[STATE][:first_tail])
