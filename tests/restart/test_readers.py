"""Both readers over a running service with the sample pages: what they agree on and refuse, before and after a kill."""

import signal
import subprocess
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import pytest

from forestage_client import Client, Gone, Prefetch
from forestage_client.pool_view import PoolView, Stale
from restart.lives import Lives
from support.manifests import Sample, payload
from support.running import start_refused

SAMPLE = Sample.load("hicache-hybrid")
MODEL = SAMPLE.manifest["model"]["name"]
TRUNK: list[str] = SAMPLE.manifest["chains"]["trunk"]["keys"]
BRANCH: list[str] = SAMPLE.manifest["chains"]["branch"]["keys"]
DIGESTS = {(f["name"], f["bytes"]): f["sha256"] for f in SAMPLE.manifest["files"]}

CONFIG = """
[server]
port = 0
[pool]
path = "{pool}"
bytes = "64MiB"
pin = "none"
[storage]
kind = "hicache-file"
[storage.hicache-file]
root = "{root}"
[[models]]
name = "{model}"
page_tokens = {page_tokens}
shards = 2
[[models.components]]
name = "kv"
bytes = 8192
slots = 50
[[models.components]]
name = "mamba"
bytes = 32768
slots = {states}
covers = "tail"
"""


@pytest.fixture
def config(tmp_path: Path, shm: Path) -> Path:
    return write_config(tmp_path, shm)


def write_config(folder: Path, shm: Path, states: int = 1) -> Path:
    path = folder / "forestage.toml"
    page_tokens = SAMPLE.manifest["model"]["page_tokens"]
    path.write_text(
        CONFIG.format(pool=shm / "pool", root=SAMPLE.root, model=MODEL, page_tokens=page_tokens, states=states)
    )
    return path


def expected(key: str, component: str) -> bytes:
    """Return the page of the manifest: the payloads of both ranks, whose digests it names."""
    size = SAMPLE.manifest["bytes_per_page_and_rank"][component]
    shards = [payload(key, component, rank, size) for rank in range(2)]
    for rank, shard in enumerate(shards):
        name = SAMPLE.manifest["file_names"][component].format(key=key, rank=rank)
        assert DIGESTS[name, size] == sha256(shard).hexdigest()
    return b"".join(shards)


def pages_of(job: Prefetch, keys: Sequence[str]) -> list[tuple[str, int, str]]:
    """Return (component, slot, key) of everything a job hands out."""
    pages = [("kv", slot, key) for slot, key in zip(job.slots["kv"], keys, strict=False)]
    return [*pages, ("mamba", job.slots["mamba"][0], keys[job.pages.ready - 1])]


def read_in_c(compiled: Path, pool: Path, component: str, slot: int, key: str) -> tuple[int, bytes]:
    command = [compiled / "pool_reader", pool, MODEL, component, str(slot), key]
    done = subprocess.run(command, capture_output=True, check=False)
    return done.returncode, done.stdout


def read_both(view: PoolView, compiled: Path, page: tuple[str, int, str]) -> bytes | None:
    """Read a page with both readers; None if both say that it is stale."""
    component, slot, key = page
    status, in_c = read_in_c(compiled, Path(view.path), component, slot, key)
    try:
        in_python = view.copy(MODEL, component, slot, key)
    except Stale:
        assert (status, in_c) == (3, b"")
        return None
    assert (status, in_c) == (0, in_python)
    return in_python


def test_both_readers_have_the_pages_of_the_manifest_and_refuse_recycled_slots(
    config: Path, shm: Path, compiled: Path, lives: Lives
) -> None:
    with Client(lives.start(config)) as client, PoolView(shm / "pool") as view:
        trunk = client.prefetch(MODEL, TRUNK, wait_ms=30_000)
        assert (trunk.outcome, trunk.pages.ready, trunk.lease is not None) == ("complete", 48, True)
        first = pages_of(trunk, TRUNK)
        for page in first:
            assert read_both(view, compiled, page) == expected(page[2], page[0])
        client.cancel(trunk.request_id)
        # The branch shares 20 pages with the trunk, and takes slots from what follows them there.
        branch = client.prefetch(MODEL, BRANCH, wait_ms=30_000)
        assert branch.outcome == "complete"
        second = pages_of(branch, BRANCH)
        taken = {(component, slot) for component, slot, key in second if (component, slot, key) not in first}
        assert {component for component, _ in taken} == {"kv", "mamba"}
        for page in first:
            assert (read_both(view, compiled, page) is None) == (page[:2] in taken)
        for page in second:
            assert read_both(view, compiled, page) == expected(page[2], page[0])
    assert lives.stop() == 0
    assert lives.told("Traceback") == []


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_restart_keeps_pages_mappings_and_nothing_else(
    config: Path, shm: Path, compiled: Path, lives: Lives, end: signal.Signals
) -> None:
    pool = shm / "pool"
    with Client(lives.start(config)) as client:
        view = PoolView(pool)
        first = client.prefetch(MODEL, TRUNK, wait_ms=30_000, lease_ms=600_000)
        assert first.lease is not None
    lives.signal(end)
    assert lives.end() == (0 if end == signal.SIGTERM else -end)
    pages, inode = pages_of(first, TRUNK), pool.stat().st_ino
    # The service is gone; what it left can still be read.
    assert all(read_both(view, compiled, page) == expected(page[2], page[0]) for page in pages)
    with Client(lives.start(config)) as client, view:
        assert len(lives.told(f"adopted the pool at {pool}: 49 pages kept, 0 dropped")) == 1
        assert (pool.stat().st_ino, view.generation) == (inode, 1)
        assert view.refresh()
        told = client.pool()
        assert (told.instance, told.generation) == (view.instance, view.generation)
        assert view.generation == 2
        with pytest.raises(Gone):
            client.renew(first.lease.id, 1000)
        assert 'forestage_pool_slots{component="kv",model="acme/hybrid-1b",state="resident"} 48.0' in client.metrics()
        again = client.prefetch(MODEL, TRUNK, wait_ms=30_000)
        assert (again.outcome, again.pages.host, again.loaded) == ("complete", 48, 0)
        assert pages_of(again, TRUNK) == pages
        assert all(read_both(view, compiled, page) == expected(page[2], page[0]) for page in pages)
        # Nobody knows whether the earlier life's pages were ever used.
        fates = [
            line for line in client.metrics().splitlines() if line.startswith("forestage_prefetched_pages_fate_to")
        ]
        assert {line.rpartition(" ")[2] for line in fates} == {"0.0"}
    assert lives.stop() == 0


def test_adopted_pages_go_deepest_first_whichever_slots_they_lie_in(config: Path, lives: Lives) -> None:
    with Client(lives.start(config)) as client:
        client.prefetch(MODEL, TRUNK, wait_ms=30_000)
    lives.kill()
    with Client(lives.start(config)) as client:
        # The 20 pages that both chains share are still there when the rest of the branch has come.
        branch = client.prefetch(MODEL, BRANCH, wait_ms=30_000)
        assert (branch.outcome, branch.pages.host, branch.loaded) == ("complete", 20, 16)
        assert client.lookup(MODEL, TRUNK).pages.host == 34
    assert lives.stop() == 0


def test_another_layout_is_not_adopted_and_a_second_service_is_refused(
    config: Path, shm: Path, tmp_path: Path, lives: Lives
) -> None:
    pool = shm / "pool"
    with Client(lives.start(config)) as client:
        client.prefetch(MODEL, TRUNK, wait_ms=30_000)
        before = pool.read_bytes()
        status, complaint = start_refused(config)
        assert (status, complaint.endswith(f"pool.path: {pool} is in use by another running service\n")) == (2, True)
        assert pool.read_bytes() == before
        assert client.ready()
    lives.kill()
    inode = pool.stat().st_ino
    with Client(lives.start(write_config(tmp_path, shm, states=2))) as client:
        assert client.pool().generation == 2
        assert client.lookup(MODEL, TRUNK).pages.host == 0
        assert client.prefetch(MODEL, TRUNK, wait_ms=30_000).outcome == "complete"
    assert len(lives.told("is replaced, and its pages are gone: it was made for another layout")) == 1
    assert pool.stat().st_ino != inode
    assert lives.stop() == 0
