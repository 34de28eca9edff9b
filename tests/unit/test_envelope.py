"""The value format: what is accepted, and that nothing else is."""

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from forestage.storage.envelope import TRAILER_BYTES, seal, seed_of, verify

KEY = bytes(range(32))
SEED = seed_of("0" * 32, "kv", 0)


def test_the_trailer_is_as_documented() -> None:
    payload = b"payload" * 100
    trailer = seal(payload, KEY, SEED)
    assert len(trailer) == TRAILER_BYTES == 96
    magic, version, key_bytes, payload_bytes, checksum, key = struct.unpack("<8sIIQQ64s", trailer)
    assert (magic, version, key_bytes, payload_bytes) == (b"FORESTAG", 1, 32, 700)
    assert checksum == xxhash.xxh3_64_intdigest(payload, SEED)
    assert key == KEY + bytes(32)


@given(st.binary(max_size=3000), st.binary(min_size=16, max_size=64))
def test_what_was_sealed_is_accepted(payload: bytes, key: bytes) -> None:
    trailer = seal(memoryview(bytearray(payload)), key, SEED)
    assert trailer == seal(payload, key, SEED)
    assert verify(trailer, payload, key, SEED)
    assert verify(memoryview(bytearray(trailer)), memoryview(payload), key, SEED)


@given(st.binary(min_size=1, max_size=300), st.data())
def test_any_flipped_bit_is_refused(payload: bytes, data: st.DataObject) -> None:
    value = bytearray(payload + seal(payload, KEY, SEED))
    bit = data.draw(st.integers(0, 8 * len(value) - 1))
    value[bit // 8] ^= 1 << bit % 8
    assert not verify(value[len(payload) :], value[: len(payload)], KEY, SEED)


@pytest.mark.parametrize(
    ("fingerprint", "component", "shard"), [("1" * 32, "kv", 0), ("0" * 32, "mamba", 0), ("0" * 32, "kv", 1)]
)
def test_another_name_is_refused(fingerprint: str, component: str, shard: int) -> None:
    trailer = seal(b"payload", KEY, SEED)
    assert not verify(trailer, b"payload", KEY, seed_of(fingerprint, component, shard))


def test_another_key_is_refused() -> None:
    trailer = seal(b"payload", KEY, SEED)
    for key in (KEY[::-1], KEY[:16], KEY + bytes(1)):
        assert not verify(trailer, b"payload", key, SEED)


def test_names_that_run_together_have_different_seeds() -> None:
    assert seed_of("a", "b1", 1) != seed_of("a", "b", 11)
    assert 0 <= SEED < 1 << 64


@pytest.mark.parametrize("trailer", [b"", b"FORESTAG", bytes(TRAILER_BYTES), bytes(TRAILER_BYTES - 1)])
def test_no_trailer_is_refused(trailer: bytes) -> None:
    assert not verify(trailer, b"payload", KEY, SEED)


def test_a_huge_length_in_the_trailer_is_only_a_wrong_one() -> None:
    trailer = bytearray(seal(b"payload", KEY, SEED))
    trailer[16:24] = struct.pack("<Q", 4 << 30)
    assert not verify(trailer, b"payload", KEY, SEED)
