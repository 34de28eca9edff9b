"""The size of a batch follows the speed of the store."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.storage.pace import LEAST_BYTES, MOST_BYTES, Pace


@pytest.mark.parametrize(
    ("bytes_per_s", "batch_bytes"), [(6e9, MOST_BYTES), (1e9, 2_500_000), (200e6, 500_000), (10e6, LEAST_BYTES)]
)
def test_settles_where_a_batch_takes_its_time(bytes_per_s: float, batch_bytes: int) -> None:
    pace = Pace()
    for _ in range(20):
        pace.learn(pace.batch_bytes, pace.batch_bytes / bytes_per_s)
    assert pace.batch_bytes == pytest.approx(batch_bytes, rel=0.01)


def test_a_batch_without_a_loaded_page_tells_nothing() -> None:
    pace = Pace()
    before = pace.batch_bytes
    pace.learn(0, 1.0)
    pace.learn(1 << 20, 0.0)
    assert pace.batch_bytes == before


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.floats(0, 1e6)), max_size=30))
def test_the_law_holds(batches: list[tuple[int, float]]) -> None:
    pace = Pace()
    for num_bytes, seconds in batches:
        before = pace.batch_bytes
        pace.learn(num_bytes, seconds)
        assert LEAST_BYTES <= pace.batch_bytes <= MOST_BYTES
        assert pace.batch_bytes <= 2 * before
