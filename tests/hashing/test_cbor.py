"""The encoder against the examples of RFC 8949, appendix A, and against itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage_client.hashing.cbor import Plain, encode, encode_uints

EXAMPLES: list[tuple[Plain, str]] = [
    (0, "00"),
    (10, "0a"),
    (23, "17"),
    (24, "1818"),
    (25, "1819"),
    (100, "1864"),
    (1000, "1903e8"),
    (1000000, "1a000f4240"),
    (1000000000000, "1b000000e8d4a51000"),
    (18446744073709551615, "1bffffffffffffffff"),
    (-18446744073709551616, "3bffffffffffffffff"),
    (-1, "20"),
    (-10, "29"),
    (-100, "3863"),
    (-1000, "3903e7"),
    (None, "f6"),
    (b"", "40"),
    (b"\x01\x02\x03\x04", "4401020304"),
    ("", "60"),
    ("a", "6161"),
    ("IETF", "6449455446"),
    ('"\\', "62225c"),
    ("ü", "62c3bc"),
    ("水", "63e6b0b4"),
    ([], "80"),
    ([1, 2, 3], "83010203"),
    ([1, [2, 3], (4, 5)], "8301820203820405"),
    (list(range(1, 26)), "98190102030405060708090a0b0c0d0e0f101112131415161718181819"),
]


@pytest.mark.parametrize(("value", "expected"), EXAMPLES)
def test_an_example(value: Plain, expected: str) -> None:
    assert encode(value).hex() == expected


@given(st.lists(st.integers(0, 300) | st.integers(0, 70_000) | st.integers(0, 2**32 - 1), max_size=300))
def test_many_integers_as_one_by_one(numbers: list[int]) -> None:
    assert encode_uints(numbers) == encode(numbers)


@pytest.mark.parametrize("value", [2**64, -(2**64) - 1])
def test_integers_that_are_too_long(value: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        encode(value)


@pytest.mark.parametrize("value", [True, 1.5, {}, {1}, [1, [False]]])
def test_what_is_not_encoded(value: Plain) -> None:
    with pytest.raises(TypeError):
        encode(value)
