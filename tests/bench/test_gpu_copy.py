"""The benchmark of copies to a GPU, as far as a machine without one can run it."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from _host_copies import in_runs, measure, region_tensor, verify
from _pool_pages import Run, filled_pool, page_key, page_number, runs_of
from forestage_client.pool_view import PoolView
from gpu_copy import SKIPPED

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_copy.py"


@given(st.permutations(range(24)), st.integers(1, 30))
def test_runs_cover_every_place_once_and_join_only_neighbours(slots: list[int], longest: int) -> None:
    runs = runs_of(slots, longest)
    assert [run.slot + step for run in runs for step in range(run.pages)] == slots
    assert [run.to + step for run in runs for step in range(run.pages)] == list(range(24))
    assert all(run.pages <= longest for run in runs)
    assert all(a.slot + a.pages != b.slot or a.pages == longest for a, b in itertools.pairwise(runs))


def test_whole_runs_stay_together() -> None:
    slots = in_runs(20, 8)
    assert sorted(slots) == list(range(20))
    assert sorted(run.pages for run in runs_of(slots, 8)) == [4, 8, 8]
    assert runs_of(list(range(5))) == [Run(0, 0, 5)]


def test_a_second_view_sees_every_slot_in_one_tensor(tmp_path: Path) -> None:
    with filled_pool(tmp_path / "pool", 4096, 6), PoolView(tmp_path / "pool", writable=True) as view:
        assert [page_number(entry.key) for entry in view.slots("bench", "kv")] == [1, 2, 3, 4, 5, 6]
        assert view.copy("bench", "kv", 4, page_key(5)) == (5).to_bytes(8, "little") * 512
        tensor = region_tensor(view)
        verify(tensor.clone(), [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("at", [0, 4096 * 3 + 17, 4096 * 6 - 1])
def test_one_wrong_byte_is_found_wherever_it_is(at: int) -> None:
    pages = torch.arange(1, 7, dtype=torch.int64).repeat_interleave(512).view(torch.uint8)
    verify(pages, [1, 2, 3, 4, 5, 6])
    pages[at] += 1
    with pytest.raises(RuntimeError, match=f"1 pages on the device differ, the first of them at place {at // 4096}"):
        verify(pages, [1, 2, 3, 4, 5, 6])


def test_a_page_in_the_wrong_place_is_found() -> None:
    pages = torch.arange(1, 7, dtype=torch.int64).repeat_interleave(512).view(torch.uint8)
    with pytest.raises(RuntimeError, match="2 pages on the device differ, the first of them at place 1"):
        verify(pages, [1, 3, 2, 4, 5, 6])


def test_all_but_the_cuda_calls_runs_on_the_cpu(tmp_path: Path) -> None:
    with filled_pool(tmp_path / "pool", 4096, 40):
        rows = measure(tmp_path / "pool", "cpu", 16, 2)
    assert [(row["way"], row["memory"]) for row in rows] == [
        (way, memory) for way in ("pages", "runs") for memory in ("pool", "pinned", "pageable")
    ]
    assert {row["copies"] for row in rows if row["way"] == "pages"} == {40}
    assert {row["copies"] for row in rows if row["way"] == "runs"} == {3}
    assert all(len(row["GB/s"]) == 2 and min(row["GB/s"]) > 0 for row in rows)


def test_two_processes_and_the_figures_as_json(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--mib", "1", "--page", "64", "--repeat", "1", "--folder", str(tmp_path)]
    figures = tmp_path / "figures.json"
    subprocess.run([sys.executable, SCRIPT, *words, "--json", figures], check=True, capture_output=True)
    assert len(json.loads(figures.read_text())["rows"]) == 6
    assert list(tmp_path.iterdir()) == [figures]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_skips_loudly() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == SKIPPED
    assert done.stdout == ""
    assert done.stderr.startswith("gpu_copy: SKIPPED, nothing was checked: torch ")
    assert len(done.stderr.splitlines()) == 1
