"""The time of the day may be wrong at the start and jump at any moment: only what a log line says goes by it."""

import random
import subprocess
import time
from pathlib import Path

import pytest

from faults.stored_pages import StoredPages
from forestage_client import Client
from support.live import make_keys
from support.running import Running, running

YEAR_S = 365 * 86400
LIBRARY = Path(__file__).with_name("wall_clock.c")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    library = tmp_path / "wall_clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, LIBRARY, "-ldl"], check=True)
    (tmp_path / "offset").write_text("0")
    return {"LD_PRELOAD": str(library), "WALL_CLOCK_OFFSET": str(tmp_path / "offset")}


def _years_in_log(service: Running) -> set[str]:
    return {line.partition('"time":')[2].strip(' "')[:4] for line in service.log if line.startswith("{")}


@pytest.mark.parametrize("years", [-50, 50])
def test_a_start_at_a_wrong_time(tmp_path: Path, environ: dict[str, str], years: int) -> None:
    pages = StoredPages.make(tmp_path)
    keys = make_keys(4)
    pages.store(keys)
    (tmp_path / "offset").write_text(str(years * YEAR_S))
    with running(pages.config, environ=environ) as service, Client(service.url, timeout_s=30) as client:
        assert client.prefetch("m", keys, wait_ms=20_000).outcome == "complete"
        assert service.stop() == 0
    this_year = time.gmtime().tm_year
    assert _years_in_log(service) & {str(this_year + years), str(this_year + years + 1), str(this_year + years - 1)}


def test_jumps_while_it_runs(tmp_path: Path, environ: dict[str, str]) -> None:
    randomness = random.Random(3)
    pages = StoredPages.make(tmp_path)
    chains = [make_keys(4, str(i)) for i in range(12)]
    for keys in chains:
        pages.store(keys)
    with running(pages.config, environ=environ) as service, Client(service.url, timeout_s=30) as client:
        held = client.prefetch("m", chains[0], wait_ms=20_000, lease_ms=600_000)
        assert held.lease is not None
        for number, keys in enumerate(chains):
            new = tmp_path / "new"
            new.write_text(str(randomness.randint(-50 * YEAR_S, 50 * YEAR_S)))
            new.rename(tmp_path / "offset")
            job = client.prefetch("m", keys, wait_ms=20_000, deadline_ms=60_000, request_id=f"r{number}")
            assert (job.outcome, job.pages.ready) == ("complete", 4)
            assert client.renew(held.lease.id, lease_ms=600_000).expires_in_ms > 500_000
            assert client.get_prefetch("r0").done  # still remembered
            assert client.ready()
        began = time.monotonic()
        assert service.stop() == 0
        assert time.monotonic() - began < 10
    assert not [line for line in service.log if "Traceback" in line]
