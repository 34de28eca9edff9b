"""Copies from host memory of three kinds to a device, timed and verified."""

import ctypes
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from _copy_device import CopyDevice, Work
from _pool_pages import COMPONENT, MODEL, Run, page_number, runs_of
from forestage_client._memory import address_of
from forestage_client.pool_view import PoolView

__all__ = ["in_runs", "measure", "region_tensor", "verify"]


def region_tensor(view: PoolView) -> Any:
    """Return all slots as one tensor of bytes over the mapping, which it keeps alive."""
    region = view.regions[MODEL][COMPONENT]
    first = view.view(MODEL, COMPONENT, 0)
    size = region.slots * region.slot_bytes
    owner = (ctypes.c_ubyte * size).from_address(address_of(first))
    owner.memory = first  # type: ignore[attr-defined]
    return torch.frombuffer(owner, dtype=torch.uint8)


def in_runs(count: int, longest: int, seed: int = 0) -> list[int]:
    """Return all slots, runs of so many in random order."""
    starts = list(range(0, count, longest))
    random.Random(seed).shuffle(starts)
    return [slot for start in starts for slot in range(start, min(start + longest, count))]


def verify(target: Any, numbers: Sequence[int]) -> None:
    """Compare every byte on the device with pages of these numbers; raises RuntimeError for the first that differs."""
    words = target.view(torch.int64).view(len(numbers), -1)
    wanted = torch.tensor(numbers, dtype=torch.int64, device=target.device).view(-1, 1)
    wrong = (words != wanted).any(dim=1).nonzero().flatten().tolist()
    if wrong:
        raise RuntimeError(f"{len(wrong)} pages on the device differ, the first of them at place {wrong[0]}")


def _copying(source: Any, target: Any, runs: Sequence[Run], page: int) -> Work:
    pieces = [
        (target[run.to * page : (run.to + run.pages) * page], source[run.slot * page : (run.slot + run.pages) * page])
        for run in runs
    ]

    def copy() -> None:
        for to, of in pieces:
            to.copy_(of, non_blocking=True)

    return copy


def _hidden(copy_s: float, compute_s: float, both_s: float) -> float:
    return (copy_s + compute_s - both_s) / min(copy_s, compute_s)


def measure(pool: Path, device_name: str, longest: int, repeat: int) -> list[dict[str, Any]]:
    """Attach to a pool, register it, copy and verify; returns the rows of the table."""
    device = CopyDevice(device_name)
    with PoolView(pool, writable=True) as view:
        region = view.regions[MODEL][COMPONENT]
        begin = time.perf_counter()
        registered = view.pin()
        pin_s = time.perf_counter() - begin
        if device.is_cuda and not registered:
            raise RuntimeError("there is a GPU, and the pool was not registered")
        sources = {"pool": region_tensor(view)}
        if device.is_cuda and not sources["pool"].is_pinned():
            raise RuntimeError("CUDA does not take the pool for pinned memory")
        sources["pinned"] = device.pinned(len(sources["pool"])).copy_(sources["pool"])
        sources["pageable"] = sources["pool"].clone()
        numbers = [page_number(entry.key) for entry in view.slots(MODEL, COMPONENT)]
        random_order = list(range(region.slots))
        random.Random(0).shuffle(random_order)
        ways = {"pages": runs_of(random_order, 1), "runs": runs_of(in_runs(region.slots, longest), longest)}
        rows = _measure(device, sources, ways, numbers, region.slot_bytes, repeat)
        sources.clear()  # nothing may refer to the mapping when it is unregistered and unmapped
    return [{"device": device.name, **row, "pin s": pin_s} for row in rows]


def _measure(
    device: CopyDevice,
    sources: dict[str, Any],
    ways: dict[str, list[Run]],
    numbers: Sequence[int],
    page: int,
    repeat: int,
) -> list[dict[str, Any]]:
    target = device.empty(page * len(numbers))
    kinds: dict[tuple[str, str], tuple[Work, list[int]]] = {
        (way, name): (
            _copying(source, target, runs, page),
            [numbers[run.slot + step] for run in runs for step in range(run.pages)],
        )
        for way, runs in ways.items()
        for name, source in sources.items()
    }
    copy_s: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
    hidden: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
    computing = device.computing(device.time_both(kinds["runs", "pinned"][0], None))
    for turn in range(repeat + 1):
        for kind, (copy, wanted) in kinds.items():
            target.zero_()
            seconds = device.time_copies(copy)
            verify(target, wanted)
            target.zero_()
            alone = device.time_both(copy, None), device.time_both(None, computing)
            both = device.time_both(copy, computing)
            verify(target, wanted)
            if turn:  # the first one is for warming up
                copy_s[kind].append(seconds)
                hidden[kind].append(_hidden(*alone, both))
    total = page * len(numbers)
    return [
        {
            "way": way,
            "memory": name,
            "copies": len(ways[way]),
            "GB/s": [total / seconds / 1e9 for seconds in copy_s[way, name]],
            "/pinned": statistics.median(
                own / other for own, other in zip(copy_s[way, "pinned"], copy_s[way, name], strict=True)
            ),
            "hidden": hidden[way, name],
        }
        for way, name in kinds
    ]
