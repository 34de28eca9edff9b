"""Every expectation of the sample manifests, through the service and a second process that reads the shared pool."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.sample_service import SampleService, model_table, serve_sample, spoil
from forestage.core.layout import ModelLayout
from forestage.storage.base import PageRead, Report
from forestage.storage.hicache import HicacheFileStorage
from forestage_client import Prefetch
from support.live import live
from support.manifests import Sample, payload

SAMPLES = {name: Sample.load(name) for name in ("hicache-hybrid", "hicache-mla")}
CASES = [
    pytest.param(name, case, id=f"{name}-{case['id']}")
    for name, sample in SAMPLES.items()
    for case in sample.cases()
    if case.get("change", {}).get("when", "before") == "before"
]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SampleService]]:
    hybrid, mla = (tmp_path_factory.mktemp(name) for name in SAMPLES)
    with serve_sample("hicache-hybrid", hybrid) as first, serve_sample("hicache-mla", mla) as second:
        yield {"hicache-hybrid": first, "hicache-mla": second}


def _check(job: Prefetch, case: dict[str, Any], page_tokens: int) -> None:
    expect = case["expect"]
    pages = {name: getattr(job.pages, name) for name in expect["pages"]}
    assert pages == expect["pages"]
    assert {name: getattr(job.tokens, name) for name in pages} == {name: page_tokens * p for name, p in pages.items()}
    assert (job.state, job.outcome, dict(job.shortfall)) == ("done", expect["outcome"], expect["shortfall"])
    if expect["loaded"] is not None:
        assert job.loaded == expect["loaded"]
    slots = {name: len(set(slots)) for name, slots in job.slots.items()}
    assert slots == (expect["slots"] or {})
    assert (job.lease is not None) == bool(expect["slots"])


@pytest.mark.parametrize(("name", "case"), CASES)
def test_case(services: dict[str, SampleService], name: str, case: dict[str, Any]) -> None:
    service = services[name]
    sample, model = service.sample, case["id"]
    with service.changed(case.get("change")):
        if "after" in case:
            earlier = service.prefetch(model, sample.case(case["after"]["case"])["request"])
            assert earlier.lease is not None
            if case["after"]["lease"] == "released":
                service.client.release(earlier.lease.id)
        keys = sample.keys(case["request"])
        found = service.client.lookup(model, keys, case["request"]["device_pages"]).pages
        job = service.prefetch(model, case["request"])
        _check(job, case, sample.manifest["model"]["page_tokens"])
        # what the lookup foretold is what came, but for pages that turned out bad
        assert (found.host, found.stored, found.restorable) == (job.pages.host, job.pages.stored, job.pages.restorable)
        assert found.grantable == job.pages.granted
        size, bad = service.read(model, keys, job)
    assert bad == []
    layout = sample.layout()
    expected = {c.name: c.bytes * c.shards for c in layout.components}
    assert size == sum(expected[component] * len(slots) for component, slots in job.slots.items())


class _Vanishing(HicacheFileStorage):
    """Loses a file after it was found and before it is read."""

    change: dict[str, Any] | None = None

    async def read_into(self, model: ModelLayout, reads: list[PageRead], report: Report) -> None:  # type: ignore[override]
        if self.change is not None:
            spoil(Path(self.root), self.change)
            self.change = None
        await super().read_into(model, reads, report)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the hybrid sample's files."""
    shutil.copytree(SAMPLES["hicache-hybrid"].root, tmp_path / "l3")
    return tmp_path / "l3"


async def test_a_page_that_vanishes_between_probe_and_read(tmp_path: Path, copy: Path) -> None:
    sample = SAMPLES["hicache-hybrid"]
    case = sample.case("page-44-vanishes")

    def expected(key: bytes, component: str) -> bytes:
        size = next(c.bytes for c in sample.layout().components if c.name == component)
        return b"".join(payload(key.hex(), component, rank, size) for rank in range(2))

    storage = _Vanishing(copy)
    model = model_table(sample, "m", case["pool_slots"])
    settings = {"max_inflight_fraction": 1.0, "settle_ms": 5000}
    async with live(tmp_path, model, inner=storage, expected=expected, prefetch=settings) as service:
        storage.change = case["change"]
        keys = sample.keys(case["request"])
        job = await service.client.prefetch("m", keys, wait_ms=20_000)
        assert storage.change is None
        _check(job, case, 16)
        await service.idle()
        assert service.sweep() == 44 + 1
        assert (await service.client.prefetch("m", keys, wait_ms=20_000)).pages.stored == 44
        await service.idle()
