"""Which `traceparent` headers are taken, and as what."""

import pytest

from forestage.core.trace_context import checked_traceparent, trace_id_of

GOOD = f"00-{'ab' * 16}-{'cd' * 8}-01"


@pytest.mark.parametrize(
    ("header", "taken"),
    [
        (GOOD, GOOD),
        (f" {GOOD} ", GOOD),
        (f"01{GOOD[2:]}-what-is-new", GOOD),
        (f"01{GOOD[2:]}", GOOD),
        (f"{GOOD}-more", ""),
        (f"01{GOOD[2:]}more", ""),
        (f"ff{GOOD[2:]}", ""),
        (GOOD.upper(), ""),
        (f"00-{'0' * 32}-{'cd' * 8}-01", ""),
        (f"00-{'ab' * 16}-{'0' * 16}-01", ""),
        (GOOD[:-1], ""),
        ("00-x\nforged", ""),
        ("", ""),
    ],
)
def test_headers(header: str, taken: str) -> None:
    assert checked_traceparent(header) == taken
    assert trace_id_of(checked_traceparent(header)) == ("ab" * 16 if taken else "")
