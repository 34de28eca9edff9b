"""L3 files that are no pages: the prefix ends before them, with a reason, and nothing else suffers (FAULTS S3)."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest

from faults.bad_files import BAD_FILES
from forestage.config import load
from forestage.storage.directory import DirectoryStorage
from forestage.storage.files import FileStorage
from forestage.storage.hicache import HicacheFileStorage
from forestage_client import Client
from forestage_client.pool_view import PoolView
from support.configs import write_config
from support.live import content, make_keys
from support.running import Running, running

Kind = Literal["file", "hicache-file"]
PAGE = 65536


def _peak_bytes(service: Running) -> int:
    lines = Path(f"/proc/{service.process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def _storage(kind: Kind, root: Path) -> DirectoryStorage:
    return FileStorage(root) if kind == "file" else HicacheFileStorage(root)


async def _store(storage: DirectoryStorage, config: Path, chains: Sequence[Sequence[bytes]]) -> None:
    layout = load(str(config), {}).layouts()[0]
    for keys in chains:
        for key in keys:
            await storage.write(layout, 0, key, [content(key, "kv", PAGE)])
    await storage.aclose()


@pytest.mark.parametrize("kind", ["file", "hicache-file"])
def test_bad_files(tmp_path: Path, kind: Kind) -> None:
    root = tmp_path / "l3"
    storage = f'kind = "{kind}"'
    sections = {"storage": storage, f"storage.{kind}": f'root = "{root}"'}
    config = write_config(tmp_path, page_bytes=PAGE, **sections)  # type: ignore[arg-type]
    chains = [make_keys(6, bad.name) for bad in BAD_FILES]
    good = make_keys(6, "good")
    asyncio.run(_store(_storage(kind, root), config, [*chains, good]))
    with running(config) as service, Client(service.url, timeout_s=20) as client, PoolView(tmp_path / "pool") as view:
        warm = client.prefetch("m", good, wait_ms=20_000, request_id="warm")
        assert warm.outcome == "complete"
        client.cancel("warm")
        peak = _peak_bytes(service)
        for bad, keys in zip(BAD_FILES, chains, strict=True):
            (path,) = root.rglob(f"{keys[3].hex()}*")
            bad.spoil(path)
            job = client.prefetch("m", keys, wait_ms=20_000, request_id="bad")
            reason = bad.reasons.get(kind)
            expected = (3, {reason: 3}) if reason else (6, {})
            assert (job.pages.ready, dict(job.shortfall)) == expected, bad.name
            assert job.pages.stored == (3 if reason == "not_stored" else 6)
            for key, slot in zip(keys, job.slots["kv"], strict=False):
                if reason or key != keys[3]:
                    assert view.copy("m", "kv", slot, key) == content(key, "kv", PAGE)
            client.cancel("bad")
            assert client.prefetch("m", good, wait_ms=20_000, request_id="good").outcome == "complete"
            client.cancel("good")
        assert _peak_bytes(service) - peak < 16 << 20
        corrupt = 3 * sum(bad.reasons.get(kind) == "corrupt" for bad in BAD_FILES)
        assert f'forestage_shortfall_pages_total{{model="m",reason="corrupt"}} {corrupt}.0' in client.metrics()
        # a page that is written whole again is found again, and not before it is whole
        asyncio.run(_store(_storage(kind, root), config, [[chains[0][3]]]))
        (path,) = root.rglob(f"{chains[0][3].hex()}*")
        whole = path.read_bytes()
        for tenth in range(11):
            path.write_bytes(whole[: len(whole) * tenth // 10])
            assert client.prefetch("m", chains[0], wait_ms=20_000).pages.ready == (6 if tenth == 10 else 3)
        assert service.stop() == 0
    assert not [line for line in service.log if "ERROR" in line or "Traceback" in line]
