"""The batches that are kept are the last ones, whatever their number and size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.core.batch_log import BatchLog


@given(
    sizes=st.lists(st.integers(0, 60), max_size=40),
    max_batches=st.integers(0, 10),
    max_bytes=st.integers(1, 100),
    since=st.integers(0, 60),
    limit=st.integers(1, 20),
)
def test_the_last_ones_are_kept(sizes: list[int], max_batches: int, max_bytes: int, since: int, limit: int) -> None:
    log = BatchLog(max_batches, max_bytes)
    all_batches = []
    for size in sizes:
        all_batches.append(log.append(b"t", bytes(size)))
        log.check_integrity()
    assert [batch.number for batch in all_batches] == list(range(len(sizes)))
    kept = all_batches[log.oldest :]
    assert log.since(0, 100) == kept
    assert log.since(since, limit) == [batch for batch in kept if batch.number >= since][:limit]
    if log.oldest and len(kept) < max_batches:
        assert sum(len(batch.payload) for batch in all_batches[log.oldest - 1 :]) > max_bytes


def test_a_defect_is_found() -> None:
    log = BatchLog(4)
    log.append(b"", b"abc")
    log._bytes += 1
    with pytest.raises(RuntimeError, match="4 bytes kept, recounted 3"):
        log.check_integrity()
    log._bytes -= 1
    log.next += 1
    log._batches.append(log._batches[0])
    with pytest.raises(RuntimeError, match="batches"):
        log.check_integrity()
