"""What a probe asks of Redis, and how the answers become masks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from contract.storage_contract import KV, STATE, hybrid, keys
from forestage.core.layout import Component, Covers, ModelLayout
from forestage.storage.base import Probe
from forestage.storage.presence import walk
from forestage.storage.redis.names import Names
from forestage.storage.redis.probing import plan_probe


def test_names_are_as_documented() -> None:
    model, (key,) = hybrid(), keys(1)
    plan = plan_probe(model, Probe([key], 0, 0, bytes(1)), Names("some prefix").of(model))
    fingerprint = model.fingerprint.encode()
    assert plan.names == [
        b"some prefix:%b:%b:%d:%b" % (fingerprint, component, shard, key)
        for component in (b"kv", b"mamba")
        for shard in (0, 1)
    ]


def test_nothing_is_asked_below_where_asking_begins() -> None:
    model, pages = hybrid(shards=1), keys(5)
    plan = plan_probe(model, Probe(pages, 3, 4, bytes(5)), Names("p").of(model))
    heads = [shards[0].head for shards in Names("p").of(model)]
    assert plan.names == [heads[KV] + pages[3], heads[KV] + pages[4], heads[STATE] + pages[4]]


def test_a_model_without_tails_and_one_with_two() -> None:
    pages = keys(3)
    kv, other = Component("kv", 64), Component("indexer", 64, shards=2)
    window = Component("window", 64, covers=Covers.TAIL, window=2)
    model = ModelLayout("acme/many", 16, (window, kv, other))
    plan = plan_probe(model, Probe(pages, 0, 0, bytes(3)), Names("p").of(model))
    flags = bytearray(b"\1" * len(plan.names))
    flags[plan.names.index(Names("p").of(model)[2][1].head + pages[2])] = 0
    masks = plan.presence(model, Probe(pages, 0, 0, bytes(3)), flags).masks
    assert [list(mask) for mask in masks] == [[1, 1, 0], [1, 1, 0], [1, 1, 0]]


@settings(deadline=None)
@given(data=st.data())
def test_masks_agree_with_asking_key_by_key(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 8))
    model, pages = hybrid(shards=data.draw(st.integers(1, 3))), keys(count)
    first_page, first_tail = (data.draw(st.integers(0, count)) for _ in range(2))
    known = bytes(data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
    probe = Probe(pages, first_page, first_tail, known)
    plan = plan_probe(model, probe, Names("p").of(model))
    there = {name for name in plan.names if data.draw(st.integers(0, 3))}
    flags = bytes(name in there for name in plan.names)

    def holds(component_index: int, key: bytes) -> bool:
        return all(shard.head + key in there for shard in Names("p").of(model)[component_index])

    found, wanted = plan.presence(model, probe, flags), walk(model, probe, holds)
    gap = next((page for page in range(first_page, count) if not (known[page] or wanted.masks[KV][page])), count)
    assert [bytes(mask[:gap]) for mask in found.masks] == [bytes(mask[:gap]) for mask in wanted.masks]
    assert not any(any(mask[gap:]) for mask in found.masks)
    assert not any(found.masks[KV][:first_page])
    assert not any(found.masks[STATE][:first_tail])
