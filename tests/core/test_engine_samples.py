"""Every expectation of the sample manifests, by the pure engine alone."""

from typing import Any

import pytest

from forestage.core.job import Job, Reason
from support.engine_driver import EngineDriver
from support.manifests import Sample

SAMPLES = [Sample.load("hicache-hybrid"), Sample.load("hicache-mla")]
CASES = [pytest.param(sample, case, id=f"{sample.name}-{case['id']}") for sample in SAMPLES for case in sample.cases()]


def _driver(sample: Sample, slots: dict[str, int]) -> EngineDriver:
    layout = sample.layout()
    driver = EngineDriver(layout, [slots[c.name] for c in layout.components])
    names: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for file in sample.manifest["files"]:
        c = [c.name for c in layout.components].index(file["component"])
        key = file["name"][:64]
        names.setdefault((c, key), []).append(file)
    for (c, key), files in names.items():
        if len(files) == layout.components[c].shards:
            driver.stored.add((c, bytes.fromhex(key)))
        if any("whole_bytes" in file for file in files):
            driver.failing[c, bytes.fromhex(key)] = Reason.CORRUPT
    return driver


def _change(driver: EngineDriver, change: dict[str, Any]) -> None:
    name = next(change[verb] for verb in ("remove", "truncate", "append", "rewrite") if verb in change)
    where = (int(".mamba" in name), bytes.fromhex(name[:64]))
    if "remove" in change:
        driver.stored.discard(where)
    elif "rewrite" in change:
        driver.failing.pop(where)
    else:
        driver.failing[where] = Reason.CORRUPT


def _run(driver: EngineDriver, sample: Sample, case: dict[str, Any]) -> Job:
    request = case["request"]
    keys = [bytes.fromhex(key) for key in sample.keys(request)]
    job = driver.submit(keys, device_pages=request["device_pages"], min_pages=request["min_pages"])
    driver.answer_probes()
    if case.get("change", {}).get("when") == "between probe and read":
        _change(driver, case["change"])
    driver.run()
    return job


@pytest.mark.parametrize(("sample", "case"), CASES)
def test_case(sample: Sample, case: dict[str, Any]) -> None:
    driver = _driver(sample, case["pool_slots"])
    if case.get("change", {}).get("when") == "before":
        _change(driver, case["change"])
    if "after" in case:
        earlier = _run(driver, sample, sample.case(case["after"]["case"]))
        assert earlier.lease is not None
        if case["after"]["lease"] == "released":
            driver.engine.leases.release(earlier.lease.id)
    job = _run(driver, sample, case)
    expect = case["expect"]
    assert job.done
    lengths = job.lengths()
    assert {name: getattr(lengths, name) for name in expect["pages"]} == expect["pages"]
    assert job.outcome == expect["outcome"]
    assert {reason.value: pages for reason, pages in job.shortfall.items()} == expect["shortfall"]
    if expect["loaded"] is not None:
        assert job.count_pages()[0] == expect["loaded"]
    if expect["slots"] is None:
        assert job.lease is None
    else:
        assert job.lease is not None
        counts = {c.name: len(slots) for c, slots in zip(driver.layout.components, job.lease.slots, strict=True)}
        assert counts == expect["slots"]
        for c, slots in enumerate(job.lease.slots):
            keys = sample.keys(case["request"])[: job.ready][-len(slots) :]
            assert [driver.logs[c].visible[slot] for slot in slots] == [bytes.fromhex(key) for key in keys]
