"""The table of aims: which figure is held against which bound, and on which side of it."""

from typing import Any

import pytest

from targets import Aim, aims


def _one(benchmark: str, row: dict[str, Any]) -> Aim:
    (aim,) = aims([{"benchmark": benchmark, "rows": [row]}])
    return aim


@pytest.mark.parametrize(
    ("benchmark", "row", "figure", "bound", "is_met"),
    [
        ("read_files", {"kind": "file", "read": "warm", "page KiB": 64, "/plain": 0.76}, 0.76, 0.75, True),
        ("read_files", {"kind": "file", "read": "warm", "page KiB": 256, "/plain": 0.90}, 0.90, 0.92, False),
        ("read_files", {"kind": "file", "read": "cold", "page KiB": 64, "/plain": 0.36}, 0.36, 0.90, False),
        ("read_redis", {"on": "tcp", "page KiB": 64, "/drain": 0.846}, 0.846, 0.85, True),
        ("read_redis", {"on": "unix", "page KiB": 4096, "/drain": 0.91}, 0.91, 0.92, False),
        ("http_prefetch", {"resident pages": 1024, "more ms": 1.004}, 1.004, 1.0, True),
        ("http_prefetch", {"resident pages": 2048, "more ms": 1.9}, 1.9, 1.8, False),
        (
            "http_prefetch",
            {"on": "tcp", "pages": "1024 x 64 KiB", "drain ms": [40.0, 39.0, 41.0], "prefetch ms": [50.0, 56.0, 49.0]},
            -5.0,
            0,
            True,
        ),
        ("index_scale", {"what": "evict", "ratio": 1.51, "target": 1.5}, 1.51, 1.5, False),
        ("index_scale", {"what": "bytes by page", "ratio": "", "large": 278.0, "target": 320}, 278.0, 320, True),
        ("start", {"ratio": 0.8, "target": 1.15}, 0.8, 1.15, True),
        ("idle", {"what": "import", "measured": [130.0, 90.0, 100.0], "target": 120}, 100.0, 120, True),
    ],
)
def test_a_figure_is_held_against_its_bound(
    benchmark: str, row: dict[str, Any], figure: float, bound: float, is_met: bool
) -> None:
    aim = _one(benchmark, row)
    assert aim.figure == pytest.approx(figure)
    assert (aim.bound, aim.is_met) == (bound, is_met)
    assert aim.row()[""] == ("" if is_met else "MISSED")


def test_jobs_beside_each_other() -> None:
    rows = [
        {"what": "16 pages alone", "p99 ms": 4.0},
        {"what": "16 pages beside", "p99 ms": 13.0},
        {"what": "loop late, nothing asked", "p99 ms": 0.4},
        {"what": "loop late, 8 jobs", "p99 ms": 4.7},
    ]
    assert [(aim.figure, aim.is_met) for aim in aims([{"benchmark": "urgent", "rows": rows}])] == [
        (4.7, True),
        (3.25, False),
    ]


def test_what_has_no_aim_is_left_out() -> None:
    assert not aims([{"benchmark": "tenants", "rows": [{"a": 1}]}])
    assert not aims([{"benchmark": "idle", "rows": [{"what": "torch", "measured": "no", "target": "no"}]}])
    assert not aims([{"benchmark": "read_files", "rows": [{"kind": "hicache-file", "read": "warm", "page KiB": 64}]}])
