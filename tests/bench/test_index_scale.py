"""The benchmark of the index leaves a pool that is whole, and measures what it says."""

import pytest

from index_scale import Index, ratios


def test_every_measurement_leaves_all_slots_resident_and_none_held() -> None:
    index = Index(1024)
    assert min(index.lookup_ns(), index.lease_ns()) > 0
    assert index.pool.index[0].evicted == 0
    assert index.evict_us() > 0
    assert index.pool.index[0].evicted == 1024
    assert (len(index.pool.index[0]), index.pool.index[0].held, len(index.leases)) == (1024, 0, 0)
    index.pool.check_integrity()


def test_a_ratio_is_of_samples_taken_in_turn() -> None:
    assert ratios([2.0, 4.0, 30.0], [1.0, 2.0, 10.0]) == pytest.approx(2.0)
