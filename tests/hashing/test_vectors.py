"""Every vector of the engines, whole and in pieces; seeds, ranges and the laws of a chain."""

import pickle
import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forestage_client.hashing import HashScheme, LoraAdapter, MmItem, PageHasher, SchemeName, SglangHasher, VllmHasher
from forestage_client.hashing.sglang import namespace_key
from forestage_client.hashing.vllm import none_hash
from hashing.vectors import RAW, SGLANG, VLLM, Vector

ALL = [pytest.param(vector, id=vector.id) for vector in (*SGLANG, *VLLM)]
SCHEMES = [
    HashScheme("sglang", 16),
    HashScheme("sglang", 16, bigram=True),
    HashScheme("sglang-old", 16),
    HashScheme("vllm-sha256-cbor", 16),
    HashScheme("vllm-xxhash-cbor", 16, seed="0"),
]


def test_how_many_there_are() -> None:
    assert (len(SGLANG), len(VLLM)) == (30, 27)
    assert sum(vector.prior is not None for vector in SGLANG) == 2


@pytest.mark.parametrize("vector", ALL)
def test_a_vector(vector: Vector) -> None:
    hasher = vector.hasher()
    assert hasher.extend(vector.tokens) == vector.keys
    assert (hasher.num_pages, hasher.num_tokens) == (len(vector.keys), len(vector.tokens))
    assert vector.scheme.num_pages(len(vector.tokens)) == len(vector.keys)
    assert all(len(key) == vector.scheme.key_bytes for key in vector.keys)


@pytest.mark.parametrize("vector", ALL)
@pytest.mark.parametrize("size", [1, 3, 16, 17])
def test_a_vector_in_pieces_through_pickle(vector: Vector, size: int) -> None:
    hasher, keys = vector.hasher(), []
    for at in range(0, len(vector.tokens), size):
        keys += hasher.extend(vector.tokens[at : at + size])
        hasher = pickle.loads(pickle.dumps(hasher))
    assert keys == vector.keys


@pytest.mark.parametrize("raw", RAW["sglang"]["vectors"], ids=lambda raw: raw["id"])
def test_the_seed_of_a_namespace(raw: dict[str, Any]) -> None:
    if raw["version"] == "0.5.23" and "seed" in raw:
        expected = "" if raw["seed"] is None else raw["seed"]
        assert namespace_key(raw.get("extra_key"), raw["cache_salt"]).hex() == expected


@pytest.mark.parametrize("raw", RAW["vllm"]["vectors"], ids=lambda raw: raw["id"])
def test_the_hash_before_the_first_block(raw: dict[str, Any]) -> None:
    assert none_hash(raw["algorithm"], raw["PYTHONHASHSEED"]).hex() == raw["none_hash"]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: f"{scheme.name}-{scheme.bigram}")
def test_long_prompts_in_steps_of_any_kind(scheme: HashScheme) -> None:
    tokens = [random.Random(at).randrange(152_000) for at in range(20_000)]
    keys = scheme.keys_of(tokens)
    assert len(keys) == (20_000 - scheme.bigram) // 16
    assert len(set(keys)) == len(keys)
    hasher = scheme.hasher()
    parts: list[Sequence[int]] = [tokens[:5000], tuple(tokens[5000:5007]), array("I", tokens[5007:])]
    assert [key for part in parts for key in hasher.extend(part)] == keys
    odd = HashScheme(scheme.name, 48, seed=scheme.seed, bigram=scheme.bigram)
    by_one: list[bytes] = []
    hasher = odd.hasher()
    for token in tokens[:2000]:
        by_one += hasher.extend([token])
    assert by_one == odd.keys_of(tokens[:2000])


def test_pages_longer_than_a_step() -> None:
    tokens = list(range(30_000))
    for scheme in (HashScheme("sglang", 10_000, bigram=True), HashScheme("vllm-sha256-cbor", 10_000)):
        keys = scheme.keys_of(tokens)
        assert len(keys) == 3 - scheme.bigram
        assert scheme.keys_of(tokens[:20_001]) == keys[:2]


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_a_chain_in_any_pieces(data: st.DataObject) -> None:
    name: SchemeName = data.draw(st.sampled_from(["sglang", "vllm-sha256-cbor"]))
    bigram = name == "sglang" and data.draw(st.booleans())
    scheme = HashScheme(name, data.draw(st.integers(1, 9)), bigram=bigram)
    largest = 2**63 - 1 if name == "sglang" else 2**32 - 1
    tokens = data.draw(st.lists(st.integers(0, 300) | st.integers(0, largest), max_size=60))
    inputs: dict[str, Any] = {"cache_salt": data.draw(st.none() | st.text(max_size=3))}
    hasher, rest, keys = scheme.hasher(**inputs), tokens, []
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        keys += hasher.extend(rest[:size])
        rest = rest[size:]
    assert keys == scheme.keys_of(tokens, **inputs)


def test_a_chain_that_was_begun_elsewhere() -> None:
    tokens = list(range(64))
    keys = VllmHasher(16, cache_salt="s").extend(tokens)
    assert VllmHasher(16, cache_salt="s", prior=keys[1]).extend(tokens[32:]) == keys[2:]


def test_wide_ids_only_change_their_own_page() -> None:
    tokens = list(range(64))
    wide = [*tokens[:40], 2**40, *tokens[41:]]
    plain, changed = SglangHasher(16).extend(tokens), SglangHasher(16).extend(wide)
    assert plain[:2] == changed[:2]
    assert SglangHasher(16, prior=changed[2]).extend(tokens[48:]) == changed[3:]
    assert SglangHasher(16).extend([*tokens[:15], 2**63 - 1])


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: f"{scheme.name}-{scheme.bigram}")
@pytest.mark.parametrize("where", [0, 20, 39])
def test_what_is_no_token_id_changes_nothing(scheme: HashScheme, where: int) -> None:
    tokens = list(range(40))
    hasher = scheme.hasher(cache_salt="s")
    begun = hasher.extend(tokens[:5])
    bad: list[tuple[Any, type[Exception]]] = [(-1, ValueError), (2**63, ValueError), (1.0, TypeError)]
    bad += [("1", TypeError), (None, TypeError)]
    if scheme.name != "sglang":
        bad.append((2**32, ValueError))
    for value, error in bad:
        with pytest.raises(error):
            hasher.extend([*tokens[:where], value, *tokens[where + 1 :]])
    assert hasher.num_tokens == 5
    assert begun + hasher.extend(tokens[5:]) == scheme.keys_of(tokens, cache_salt="s")


def test_branches_of_a_conversation() -> None:
    tokens = list(range(100))
    for scheme in SCHEMES:
        trunk = scheme.hasher()
        shared = trunk.extend(tokens[:50])
        branch = trunk.copy()
        one, other = trunk.extend(tokens[50:]), branch.extend(tokens[:50])
        assert shared + one == scheme.keys_of(tokens)
        assert shared + other == scheme.keys_of([*tokens[:50], *tokens[:50]])


def test_items_that_come_with_later_turns() -> None:
    tokens = list(range(200))
    items = [MmItem("a", 3, 20), MmItem("b", 90, 40), MmItem("c", 150, 10)]
    whole = VllmHasher(16, mm=items).extend(tokens)
    hasher = VllmHasher(16, mm=items[:1])
    keys = hasher.extend(tokens[:80])
    with pytest.raises(ValueError, match="before token 80"):
        hasher.extend([], mm=[MmItem("late", 79, 5)])
    with pytest.raises(ValueError, match="token ids"):
        hasher.extend([-1], mm=items[1:])
    keys += hasher.extend(tokens[80:100], mm=items[1:2])
    keys += hasher.extend(tokens[100:], mm=items[2:])
    assert keys == whole
    assert whole[:5] != VllmHasher(16).extend(tokens)[:5]


def test_the_adapter_of_sglang_is_appended_to_the_extra_key() -> None:
    scheme, tokens = HashScheme("sglang", 16), range(32)
    assert scheme.keys_of(tokens, lora="sql") == scheme.keys_of(tokens, extra_key="sql")
    assert scheme.keys_of(tokens, extra_key="a", lora="b") == scheme.keys_of(tokens, extra_key="ab")
    assert HashScheme("sglang-old", 16).keys_of(tokens, lora="b") == scheme.keys_of(tokens)


def test_what_does_not_fit_together() -> None:
    mistakes: list[tuple[Any, ...]] = [
        ("sglang", 0),
        ("sglang", 16, "0"),
        ("vllm-xxhash-cbor", 16),
        ("vllm-sha256-cbor", 16, None, True),
        ("md5", 16),
    ]
    for arguments in mistakes:
        with pytest.raises(ValueError, match=r"."):
            HashScheme(*arguments)
    vllm, sglang = HashScheme("vllm-sha256-cbor", 16), HashScheme("sglang", 16)
    refused: list[tuple[HashScheme, dict[str, Any]]] = [
        (vllm, {"extra_key": "a"}),
        (vllm, {"lora": "a"}),
        (sglang, {"lora": LoraAdapter("a", "b")}),
        (sglang, {"mm": [MmItem("a", 0, 1)]}),
    ]
    for scheme, inputs in refused:
        with pytest.raises(ValueError, match=next(iter(inputs))):
            scheme.hasher(**inputs)
    with pytest.raises(ValueError, match="32 bytes"):
        VllmHasher(16, prior=bytes(16))
    with pytest.raises(ValueError, match="offset"):
        MmItem("a", -1, 1)


def test_a_hasher_is_a_page_hasher() -> None:
    assert all(isinstance(vector.hasher(), PageHasher) for vector in (*SGLANG, *VLLM))
