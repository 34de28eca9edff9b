"""A real service over a copy of a sample directory, with a model of its own for each case, and a process that reads."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from forestage_client import Client, Prefetch
from support.manifests import Sample, payload
from support.running import running

__all__ = ["SampleService", "model_table", "serve_sample", "spoil"]


def model_table(sample: Sample, name: str, slots: Mapping[str, int]) -> dict[str, Any]:
    """Return the sample's model as a configuration has it, under another name and with so many slots."""
    manifest = sample.manifest
    model = manifest["model"]
    return {
        "name": name,
        **{key: model[key] for key in ("page_tokens", "shards", "dtype", "layout")},
        "hicache": {
            "served_name": model["name"],
            "tp_size": manifest["tp_size"],
            "mla": manifest["is_mla_model"],
        },
        "components": [
            {**{key: c[key] for key in ("name", "bytes", "covers", "window") if key in c}, "slots": slots[c["name"]]}
            for c in model["components"]
        ],
    }


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def spoil(root: Path, change: Mapping[str, Any]) -> None:
    """Change a file of a copy as a case says."""
    path = root / next(change[verb] for verb in ("remove", "truncate", "append", "rewrite") if verb in change)
    if "remove" in change:
        path.unlink()
    elif "truncate" in change:
        path.write_bytes(path.read_bytes()[: change["to"]])
    elif "append" in change:
        path.write_bytes(path.read_bytes() + b"\0" * change["bytes"])
    else:
        path.write_bytes(payload(path.name[:64], "kv", 0, 4096))


@dataclass
class SampleService:
    """What a case needs. Files that a case changes are mended after it."""

    sample: Sample
    root: Path
    client: Client
    reader: "subprocess.Popen[str]"

    @cached_property
    def digests(self) -> dict[tuple[str, str], list[str]]:
        """SHA-256 of each shard of a page, by component and key; of a short file, of what it should have been."""
        found: dict[tuple[str, str], list[str]] = {}
        for file in sorted(self.sample.manifest["files"], key=lambda file: int(file["rank"])):
            digest = file.get("whole_sha256", file["sha256"])
            found.setdefault((file["component"], file["name"][:64]), []).append(digest)
        return found

    def prefetch(self, model: str, request: Mapping[str, Any]) -> Prefetch:
        return self.client.prefetch(
            model,
            self.sample.keys(dict(request)),
            device_pages=request["device_pages"],
            min_pages=request["min_pages"],
            wait_ms=20_000,
        )

    def read(self, model: str, keys: Sequence[str], job: Prefetch) -> tuple[int, list[str]]:
        """Have the other process compare every page of a job; return how many bytes, and what was wrong."""
        named = []
        for component, slots in job.slots.items():
            for key, slot in zip(keys[job.pages.ready - len(slots) : job.pages.ready], slots, strict=True):
                named.append((component, slot, key, self.digests[component, key]))
        assert self.reader.stdin is not None
        assert self.reader.stdout is not None
        self.reader.stdin.write(json.dumps({"model": model, "slots": named}) + "\n")
        self.reader.stdin.flush()
        answer = json.loads(self.reader.stdout.readline())
        return answer["bytes"], answer["bad"]

    @contextmanager
    def changed(self, change: Mapping[str, Any] | None) -> Iterator[None]:
        if change is None:
            yield
            return
        name = next(change[verb] for verb in ("remove", "truncate", "append", "rewrite") if verb in change)
        before = (self.root / name).read_bytes()
        spoil(self.root, change)
        try:
            yield
        finally:
            (self.root / name).write_bytes(before)


@contextmanager
def serve_sample(name: str, folder: Path) -> Iterator[SampleService]:
    """Run a service with one model for each case of a sample."""
    sample = Sample.load(name)
    root = folder / "l3"
    shutil.copytree(sample.root, root)
    models = [model_table(sample, case["id"], case["pool_slots"]) for case in sample.cases()]
    config = folder / "forestage.toml"
    config.write_text(
        f"models = {_toml(models)}\n[server]\nport = 0\n"
        f'[pool]\npath = "{folder}/pool"\nbytes = "256MiB"\npin = "none"\n'
        f'[storage]\nkind = "hicache-file"\n[storage.hicache-file]\nroot = "{root}"\n'
        "[prefetch]\nmax_inflight_fraction = 1.0\nsettle_ms = 5000\n"
    )
    with running(config) as service, Client(service.url, timeout_s=30) as client:
        command = [sys.executable, "-m", "forestage.demo", "--verify", client.pool().path]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
            yield SampleService(sample, root, client, reader)
            reader.communicate(timeout=30)
            assert reader.returncode == 0
        assert service.stop() == 0
    assert not [line for line in service.log if "Traceback" in line]
