"""Pages that SGLang wrote, copied with `forestage l3 put` and served from where they went."""

import shutil
from pathlib import Path

import pytest

from e2e.sample_service import model_table
from forestage.cli.main import main
from forestage_client import Client
from forestage_client.pool_view import PoolView
from support.manifests import Sample, payload
from support.running import running

CONFIG = """
[server]
port = 0
[pool]
path = "{folder}/pool"
bytes = "64MiB"
pin = "none"
[storage.file]
root = "{folder}/l3"
[[models]]
name = "{name}"
page_tokens = 16
shards = 2
[[models.components]]
name = "kv"
bytes = 8192
slots = 128
[[models.components]]
name = "mamba"
bytes = 32768
covers = "tail"
slots = 8
"""


def test_from_hicache_to_file_to_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = Sample.load("hicache-hybrid")
    model = model_table(sample, sample.manifest["model"]["name"], {"kv": 128, "mamba": 8})
    config = tmp_path / "forestage.toml"
    config.write_text(CONFIG.format(folder=tmp_path, name=model["name"]))
    source = tmp_path / "hicache"
    shutil.copytree(sample.root, source)
    keys = sample.manifest["chains"]["trunk"]["keys"]
    whole = source / f"{keys[30]}_acme-hybrid-1b_0_2.bin"
    whole.write_bytes(whole.read_bytes()[:100])  # one that must not be copied

    words = ["l3", "put", "--config", str(config), "--model", model["name"], "--from", f"hicache-file:{source}"]
    main(words)
    said = capsys.readouterr().out
    assert "69 pages" in said, said  # 64 of KV less one, 6 states
    with running(config) as service, Client(service.url, timeout_s=20) as client:
        job = client.prefetch(model["name"], keys, wait_ms=20_000)
        assert (job.pages.stored, job.pages.ready) == (30, 24)
        assert dict(job.shortfall) == {"not_stored": 18, "no_boundary": 6}
        with PoolView(client.pool().path) as view:
            for key, slot in zip(keys, job.slots["kv"], strict=False):
                shards = view.copy(model["name"], "kv", slot, key)
                assert shards == b"".join(payload(key, "kv", rank, 8192) for rank in range(2))
        assert service.stop() == 0
