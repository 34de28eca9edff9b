"""Sizes and modes as text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forestage.config.quantities import MAX_BYTES, parse_bytes, parse_mode, show_bytes, show_mode

SPELLED = {
    1: 1,
    MAX_BYTES: MAX_BYTES,
    "1024": 1024,
    "1KiB": 1 << 10,
    "1Ki": 1 << 10,
    "1kB": 1000,
    "1KB": 1000,
    "1k": 1000,
    "8Mi": 8 << 20,
    "512MB": 512 * 10**6,
    "1GiB": 1 << 30,
    "64Gi": 64 << 30,
    "64G": 64 * 10**9,
    "1.5GiB": 3 << 29,
    "1.1GiB": 1181116006,
    "2 GiB": 2 << 30,
    "3TiB": 3 << 40,
    "1PiB": MAX_BYTES,
    "100B": 100,
    "007": 7,
}

REFUSED: list[object] = [
    0,
    -1,
    MAX_BYTES + 1,
    True,
    False,
    None,
    1.5,
    float("nan"),
    b"1GiB",
    [],
    "",
    " ",
    "GiB",
    "-1",
    "+1",
    "-1GiB",
    "0",
    "0GiB",
    "0.9",
    "nan",
    "inf",
    "1e9",
    "1GiBB",
    "1iB",
    "1ki",
    "1gb",
    "1Zi",
    "1m",
    "1,5GiB",
    "1_000",
    "1..5Gi",
    ".5Gi",
    "5.Gi",
    "1  GiB",
    "1GiB\n",
    "٣GiB",
    "0x10",
    "9" * 20,
    "8" * 5000,
    "2PiB",
]


@pytest.mark.parametrize(("value", "size"), SPELLED.items())
def test_reads_a_size(value: object, size: int) -> None:
    assert parse_bytes(value) == size


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: repr(value)[:20])
def test_refuses_what_is_no_size(value: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_bytes(value)


@settings(deadline=None)  # shared machines pause
@given(st.integers(1, MAX_BYTES))
def test_a_shown_size_reads_back(size: int) -> None:
    assert parse_bytes(show_bytes(size)) == size
    assert parse_bytes(str(size)) == size


@settings(deadline=None)  # shared machines pause
@given(st.integers(1, 1023), st.integers(0, 4))
def test_whole_units_are_shown_as_units(count: int, power: int) -> None:
    expected = count if power == 0 else f"{count}{'KMGT'[power - 1]}iB"
    assert show_bytes(count << (10 * power)) == expected


@settings(deadline=None)  # shared machines pause
@given(st.integers(1, 999), st.integers(0, 10**6), st.sampled_from(["Ki", "Mi", "Gi", "k", "M", "G"]))
def test_a_larger_number_is_never_a_smaller_size(whole: int, millionths: int, unit: str) -> None:
    lower = parse_bytes(f"{whole}{unit}")
    between = parse_bytes(f"{whole}.{millionths % 10**6:06d}{unit}")
    upper = parse_bytes(f"{whole + 1}{unit}")
    assert lower <= between <= upper


@settings(deadline=None)  # shared machines pause
@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    try:
        size = parse_bytes(text)
    except ValueError as error:
        size = 0
        refusal = str(error)
    assert 1 <= size <= MAX_BYTES or refusal.startswith("must be")


@pytest.mark.parametrize(("text", "mode"), [("0660", 0o660), ("660", 0o660), ("0600", 0o600), ("0777", 0o777)])
def test_reads_a_mode(text: str, mode: int) -> None:
    assert parse_mode(text) == mode
    assert parse_mode(show_mode(mode)) == mode


@pytest.mark.parametrize("value", [660, 0o660, "", "66", "0668", "0o660", "00660", "-660", "0460", "0000", True, None])
def test_refuses_what_is_no_usable_mode(value: object) -> None:
    with pytest.raises(ValueError, match="must "):
        parse_mode(value)
