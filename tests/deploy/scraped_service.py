"""A real service under load, scraped by a real Prometheus that also evaluates the alerts."""

import contextlib
import json
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.places import RULES, tool
from forestage_client import Client
from support.manifests import Sample
from support.redis_process import free_port
from support.running import running

__all__ = ["Prometheus", "scraped_service"]

_CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: forestage
    static_configs: [{{targets: ["{target}"]}}]
"""


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus, asked by its HTTP API."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """Return `data` of an answer; an error's text becomes that of an AssertionError."""
        try:
            query = urllib.parse.urlencode(parameters)
            with urllib.request.urlopen(f"{self.url}{path}?{query}", timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def query(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of each series that an expression gives now."""
        result = self.get("/api/v1/query", query=expr)["result"]
        return [(sample["metric"], float(sample["value"][1])) for sample in result]

    def until(self, expr: str, deadline_s: float = 60.0) -> list[tuple[dict[str, str], float]]:
        """Return what an expression gives as soon as one of the values is a number; fail when none has been."""
        deadline = time.monotonic() + deadline_s
        while True:
            found = self.query(expr)
            if any(value == value for _, value in found):
                return found
            assert time.monotonic() < deadline, f"no data for {expr}: {found}"
            time.sleep(0.2)


def _serve(folder: Path, sample: Sample) -> Path:
    """Write the configuration of a service with two models whose pools are too small, over the sample's files."""
    tables = []
    for name, slots, states in (("short", 30, 8), ("narrow", 50, 1)):
        model = sample.manifest["model"]
        hicache = f'{{served_name = "{model["name"]}", tp_size = {sample.manifest["tp_size"]}}}'
        tables.append(
            f'[[models]]\nname = "{name}"\npage_tokens = {model["page_tokens"]}\nshards = {model["shards"]}\n'
            f"hicache = {hicache}\n"
        )
        for component, count in zip(model["components"], (slots, states), strict=True):
            tail = 'covers = "tail"\n' if component["covers"] == "tail" else ""
            tables.append(
                f'[[models.components]]\nname = "{component["name"]}"\n'
                f"bytes = {component['bytes']}\nslots = {count}\n{tail}"
            )
    path = folder / "forestage.toml"
    path.write_text(
        f'[server]\nport = 0\n[pool]\npath = "{folder}/pool"\nbytes = "64MiB"\npin = "none"\n'
        f'[storage]\nkind = "hicache-file"\n[storage.hicache-file]\nroot = "{sample.root}"\n' + "".join(tables)
    )
    return path


def _load(url: str, sample: Sample, stopped: threading.Event) -> None:
    """Prefetch over and over: with room and without, stored and not; some leases are released, the others run out."""
    chains = {name: chain["keys"] for name, chain in sample.manifest["chains"].items()}
    with Client(url, timeout_s=30) as client:
        while not stopped.wait(0.02):
            for model in ("short", "narrow"):
                for keys in (chains["trunk"] + sample.manifest["unknown_keys"], chains["branch"], chains["trunk"][:20]):
                    job = client.prefetch(model, keys, wait_ms=10_000, lease_ms=50)
                    if job.lease is not None and len(keys) != len(chains["branch"]):
                        client.release(job.lease.id)


@contextmanager
def scraped_service(folder: Path) -> Iterator[Prometheus]:
    """Run service, load and Prometheus until the block ends."""
    sample = Sample.load("hicache-hybrid")
    port = free_port()
    log = folder / "prometheus.log"
    with running(_serve(folder, sample)) as service:
        config = folder / "prometheus.yml"
        config.write_text(_CONFIG.format(rules=RULES, target=f"127.0.0.1:{service.port}"))
        command = [tool("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
        stopped = threading.Event()
        load = threading.Thread(target=_load, args=(service.url, sample, stopped))
        with log.open("wb") as output, subprocess.Popen(command, stderr=output, stdout=output) as process:
            load.start()
            try:
                prometheus = Prometheus(f"http://127.0.0.1:{port}")
                _wait_until_scraped(prometheus, process, log)
                yield prometheus
                assert load.is_alive(), "the load ended early"
            finally:
                stopped.set()
                load.join()
                process.terminate()


def _wait_until_scraped(prometheus: Prometheus, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 60
    is_ready = False
    while not (is_ready and prometheus.query('up{job="forestage"} == 1')):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
        # It does not listen yet, or (an HTTPError is an OSError) still reads its files.
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{prometheus.url}/-/ready", timeout=10):
            is_ready = True
