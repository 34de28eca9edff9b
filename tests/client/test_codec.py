"""Keys and slot lists survive the wire in either encoding; what is no key is refused before it is sent."""

import json

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage_client import BadRequest, Encoding, Key
from forestage_client._codec import (
    JSON_TYPE,
    MEDIA_TYPES,
    MSGPACK_TYPE,
    decode_body,
    decode_keys,
    decode_slots,
    encode_body,
    encode_slots,
)

ENCODINGS: tuple[Encoding, ...] = ("msgpack", "json")
encodings = st.sampled_from(ENCODINGS)
raw_keys = st.binary(min_size=16, max_size=64)
written_keys = raw_keys.flatmap(lambda raw: st.sampled_from([raw, raw.hex(), raw.hex().upper()]))
equal_keys = st.integers(16, 64).flatmap(lambda size: st.lists(st.binary(min_size=size, max_size=size)))


def sent(body: dict[str, object], keys: list[Key], encoding: Encoding) -> dict[str, object]:
    decoded = decode_body(encode_body(body, keys, encoding), MEDIA_TYPES[encoding])
    assert isinstance(decoded, dict)
    return decoded


@given(st.lists(written_keys), encodings)
def test_keys_arrive_in_order_whichever_way_they_are_written(keys: list[Key], encoding: Encoding) -> None:
    body = sent({"model": "m"}, keys, encoding)
    assert body["model"] == "m"
    assert decode_keys(body) == [key if isinstance(key, bytes) else bytes.fromhex(key) for key in keys]


@given(equal_keys)
def test_keys_of_one_size_travel_as_one_bin(keys: list[bytes]) -> None:
    body = sent({}, list(keys), "msgpack")
    assert body == ({"keys": b"".join(keys), "key_bytes": len(keys[0])} if keys else {"keys": []})


@given(st.lists(st.integers(0, 2**32 - 1)), encodings)
def test_slots_round_trip(slots: list[int], encoding: Encoding) -> None:
    wire = decode_body(encode_body({"slots": encode_slots(slots, encoding)}, None, encoding), MEDIA_TYPES[encoding])
    assert isinstance(wire, dict)
    assert decode_slots(wire["slots"]) == tuple(slots)


def test_slots_are_little_endian_u32() -> None:
    assert decode_slots(bytes([7, 0, 0, 0, 0, 1, 0, 0])) == (7, 256)


@pytest.mark.parametrize("wrong", [b"\0\0\0", ["1"], 3, None])
def test_other_slot_lists_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="slot list"):
        decode_slots(wrong)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("one_key", ["00" * 16, bytes(16)])
def test_one_key_is_not_a_sequence_of_keys(one_key: Key, encoding: Encoding) -> None:
    with pytest.raises(BadRequest, match="sequence of keys"):
        encode_body({}, one_key, encoding)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["zz" * 16, "00 " * 16, "0" * 33, 7, None])
def test_msgpack_refuses_what_is_no_key(wrong: object) -> None:
    with pytest.raises(BadRequest, match="page key must be hex"):
        encode_body({}, [bytes(16), wrong], "msgpack")  # type: ignore[list-item]


@pytest.mark.parametrize("wrong", [7, None])
def test_json_refuses_what_is_no_key(wrong: object) -> None:
    with pytest.raises(BadRequest, match="page key must be hex"):
        encode_body({}, ["00" * 16, wrong], "json")  # type: ignore[list-item]


@pytest.mark.parametrize("body", [{}, {"keys": 3}, {"keys": b"123"}, {"keys": b"123", "key_bytes": 2}])
def test_bodies_without_keys_are_told(body: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="keys"):
        decode_keys(body)


@pytest.mark.parametrize(
    ("content", "media_type"),
    [
        (b"{", JSON_TYPE),
        (b"[" * 100_000, JSON_TYPE),
        (b"\xff", JSON_TYPE),
        (b"\x92\x01", MSGPACK_TYPE),
        (b"\x01\x01", MSGPACK_TYPE),
        (b"\xc1", MSGPACK_TYPE),
        (b"\x91" * 100_000, MSGPACK_TYPE),
        (msgpack.packb({"a": 1}) + b"\0", MSGPACK_TYPE),
        (b"<html>", "text/html"),
        (b"{}", ""),
    ],
)
def test_unreadable_bodies_are_value_errors(content: bytes, media_type: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the words are the decoders'
        decode_body(content, media_type)


def test_media_types_are_read_with_parameters_and_any_case() -> None:
    assert decode_body(b"{}", "Application/JSON; charset=utf-8") == {}
    assert decode_body(json.dumps({"a": 1}).encode(), "application/problem+json") == {"a": 1}
