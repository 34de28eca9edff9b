"""Prompts in place of keys, against the fake service; and the bodies they are written as."""

import json
from array import array
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.both_clients import Clients
from client.guide import run_example
from forestage_client import BadRequest, Component, Model, NotFound, Prompt
from forestage_client._codec import decode_body, decode_prompt, encode_body
from forestage_client.hashing import HashScheme, LoraAdapter, MmItem
from forestage_client.testing import FakeForestage

TOKENS = list(range(100))
KV = (Component("kv", 64),)
SGLANG = Model("s", 16, KV, hash="sglang")
VLLM = Model("v", 16, KV, hash="vllm-xxhash-cbor")
PLAIN = Model("p", 16, KV)
SCHEME = HashScheme("sglang", 16)

texts = st.none() | st.text(max_size=5)
items = st.builds(MmItem, st.text(max_size=5), st.integers(0, 99), st.integers(1, 99))
prompts = st.builds(
    Prompt,
    st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 2**63 - 1), max_size=20),
    texts,
    texts,
    texts | st.builds(LoraAdapter, st.text(max_size=5), st.text(max_size=5)),
    st.lists(items, max_size=2),
    st.booleans(),
)


@given(prompts, st.sampled_from(["msgpack", "json"]))
def test_bodies_come_back(prompt: Prompt, encoding: Any) -> None:
    media = {"msgpack": "application/msgpack", "json": "application/json"}[encoding]
    body = decode_body(encode_body({"model": "m"}, prompt, encoding), media)
    assert isinstance(body, dict)
    again = decode_prompt(body)
    assert list(again.token_ids) == list(prompt.token_ids)
    for name in ("extra_key", "cache_salt", "lora", "mm", "include_keys"):
        assert getattr(again, name) == getattr(prompt, name)


def test_how_token_ids_are_written() -> None:
    packed = msgpack.unpackb(encode_body({}, Prompt(array("I", [1, 2**32 - 1])), "msgpack"))
    assert packed == {"token_ids": b"\1\0\0\0\xff\xff\xff\xff"}
    assert msgpack.unpackb(encode_body({}, Prompt((1, 2**32)), "msgpack")) == {"token_ids": [1, 2**32]}
    assert json.loads(encode_body({}, Prompt(array("I", [1, 2])), "json")) == {"token_ids": [1, 2]}
    for bad in ([1.5], ["1"], [None]):
        with pytest.raises(BadRequest, match="integers"):
            encode_body({}, Prompt(bad), "json")  # type: ignore[arg-type]


@pytest.mark.parametrize("encoding", ["msgpack", "json"])
def test_the_fake_derives_keys(clients: Clients, encoding: Any) -> None:
    fake = FakeForestage([SGLANG, VLLM, PLAIN])
    keys = tuple(SCHEME.keys_of(TOKENS))
    fake.store("s", keys[:4])
    client = clients.of(fake, encoding=encoding)
    hashed = client.hash("s", Prompt(TOKENS))
    assert (hashed.model, hashed.scheme, hashed.page_tokens, hashed.keys) == ("s", "sglang", 16, keys)
    assert client.lookup("s", Prompt(TOKENS)).pages.stored == 4
    assert client.lookup("s", Prompt(TOKENS, include_keys=True)).keys == keys
    job = client.prefetch("s", Prompt(TOKENS, include_keys=True), request_id="one")
    assert (job.pages.ready, job.keys) == (4, keys)
    assert client.prefetch("s", keys, request_id="one").request_id == "one"
    leased = client.lease("s", Prompt(TOKENS, include_keys=True))
    assert (leased.pages.ready, leased.keys) == (4, keys)
    assert client.lookup("s", Prompt(TOKENS, cache_salt="x")).pages.stored == 0
    adapted = Prompt(TOKENS, lora=LoraAdapter("a", "b"), mm=[MmItem("i", 3, 5)])
    seeded = HashScheme("vllm-xxhash-cbor", 16, seed="0")
    assert client.hash("v", adapted).keys == tuple(seeded.keys_of_prompt(adapted))
    assert [model.hash for model in client.models()] == ["sglang", "vllm-xxhash-cbor", None]


def test_what_the_fake_refuses(clients: Clients) -> None:
    client = clients.of(FakeForestage([SGLANG, VLLM, PLAIN]))
    for ask in (client.hash, client.lookup, client.prefetch, client.lease):
        with pytest.raises(BadRequest) as caught:
            ask("p", Prompt(TOKENS))
        assert caught.value.slug == "no-hash-scheme"
        with pytest.raises(NotFound):
            ask("other", Prompt(TOKENS))
        with pytest.raises(BadRequest):
            ask("v", Prompt(TOKENS, extra_key="e"))
        with pytest.raises(BadRequest):
            ask("s", Prompt([-1]))


def test_the_guide_hashes_turn_by_turn() -> None:
    assert len(run_example("hasher.extend(")["keys"]) == 2
