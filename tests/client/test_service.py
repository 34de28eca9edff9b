"""Both clients against the service itself, in a process of its own, and the guide's examples on its pool."""

import hashlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import pytest

from client.both_clients import Clients
from client.guide import run_example
from forestage_client import Client, Conflict, Encoding, Gone, NotFound, Readiness, Unauthorized
from support.manifests import Sample

SAMPLE = Sample.load("hicache-hybrid")
TRUNK: list[str] = SAMPLE.manifest["chains"]["trunk"]["keys"]
NAME: str = SAMPLE.manifest["model"]["name"]
CONFIG = """
[server]
port = 0
uds = "{home}/s"
token_file = "{home}/token"
[pool]
path = "{home}/pool"
bytes = "16MiB"
pin = "none"
[storage]
kind = "hicache-file"
[storage.hicache-file]
root = "{root}"
[[models]]
name = "{name}"
page_tokens = 16
shards = 2
[[models.components]]
name = "kv"
bytes = 8192
[[models.components]]
name = "mamba"
bytes = 32768
covers = "tail"
window = 1
slots = 8
"""


@dataclass(frozen=True)
class Service:
    """`urls`: over TCP, and through the unix socket."""

    urls: dict[str, str]
    token: str


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    home = tmp_path_factory.mktemp("s")
    (home / "token").write_text("t0ken\n")
    config = home / "forestage.toml"
    config.write_text(CONFIG.format(home=home, root=SAMPLE.root, name=NAME))
    command = [sys.executable, "-m", "forestage", "serve", "--config", str(config)]
    with (home / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    with process.stdout:
        try:
            ready = process.stdout.readline().split()
            assert ready[:2] == ["forestage", "ready"], (home / "log").read_text()
            yield Service({"tcp": ready[2], "unix": f"unix:{home}/s"}, "t0ken")
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0


@pytest.fixture(params=["msgpack", "json"])
def encoding(request: pytest.FixtureRequest) -> Encoding:
    return cast("Encoding", request.param)


@pytest.fixture(params=["tcp", "unix"])
def client(clients: Clients, service: Service, encoding: Encoding, request: pytest.FixtureRequest) -> Client:
    return clients.connect(service.urls[request.param], token=service.token, encoding=encoding)


def test_the_whole_surface(client: Client) -> None:
    job = client.prefetch(NAME, TRUNK[:44], request_id="r", wait_ms=20_000, lease_ms=5000)
    assert (job.request_id, job.model, job.state, job.outcome) == ("r", NAME, "done", "partial")
    assert (job.pages.stored, job.pages.ready, job.tokens.ready, job.shortfall) == (44, 40, 640, {"no_boundary": 4})
    assert {name: len(set(slots)) for name, slots in job.slots.items()} == {"kv": 40, "mamba": 1}
    assert set(job.timing_ms) == {"queued", "probe", "load", "total"}
    assert job.lease is not None
    assert 0 < job.lease.expires_in_ms <= 5000
    for same in (client.get_prefetch("r"), client.wait("r", 5), client.finish("r")):
        assert (same.pages, same.slots) == (job.pages, job.slots)
    assert client.prefetch(NAME, [bytes.fromhex(key) for key in TRUNK[:44]], request_id="r", lease_ms=5000).done
    with pytest.raises(Conflict):
        client.prefetch(NAME, TRUNK[:43], request_id="r")

    assert client.renew(job.lease.id, 60_000).expires_in_ms > 50_000
    found = client.lookup(NAME, TRUNK, device_pages=8)
    assert (found.pages.host, found.pages.restorable, found.tokens.grantable) == (40, 48, 768)
    assert found.boundaries == (16, 24, 40, 48)
    leased = client.lease(NAME, TRUNK, device_pages=8, lease_ms=1000)
    assert (leased.pages.ready, leased.slots["kv"]) == (40, job.slots["kv"][8:])
    assert leased.lease is not None
    client.release(leased.lease.id)
    client.release(leased.lease.id)
    with pytest.raises(Gone):
        client.renew(leased.lease.id, 1000)
    client.cancel("r")
    client.cancel("r")
    with pytest.raises(NotFound):
        client.get_prefetch("r")
    with pytest.raises(NotFound):
        client.prefetch("nobody", TRUNK)

    (model,) = client.models()
    assert [(c.name, c.bytes, c.is_tail, c.window, c.shards) for c in model.components] == [
        ("kv", 8192, False, 0, 2),
        ("mamba", 32768, True, 1, 2),
    ]
    assert len(model.fingerprint) == 32
    region = client.pool().regions[NAME]["mamba"]
    assert (region.slots, region.shards, region.shard_bytes, region.slot_bytes) == (8, 2, 32768, 65536)
    info = client.info()
    assert (info.storage, info.pinned) == ("hicache-file", "none")
    assert info.uptime_s > 0
    assert client.healthy()
    assert client.ready() == Readiness(True, "up")
    assert f'forestage_prefetch_requests_total{{model="{NAME}",outcome="partial"}}' in client.metrics()
    client.prefetch(NAME, TRUNK[:2], request_id="told", wait_ms=5000)
    told = client.timeline("told")
    assert (told.request_id, told.state, told.moments[-1].event, told.cuts) == ("told", "done", "done", 0)
    assert client.status()["finished"][0]["request_id"] == "told"
    client.cancel("told")


def test_a_wrong_token(clients: Clients, service: Service) -> None:
    with pytest.raises(Unauthorized):
        clients.connect(service.urls["tcp"], token="wrong").models()


def test_the_guide_reads_pages(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run_example("def read_prefix")
    monkeypatch.setitem(names, "Client", lambda url: Client(url, token=service.token))
    read_prefix: Callable[[str, str, list[str]], list[bytes]] = names["read_prefix"]
    pages = read_prefix(service.urls["unix"], NAME, TRUNK[:24])
    assert capsys.readouterr().out == "complete: 24 of 24 pages, shortfall {}\n"
    kv_files = [file for file in SAMPLE.manifest["files"] if file["component"] == "kv"]
    written = {(file["name"][:64], file["rank"]): file["sha256"] for file in kv_files}
    read = {
        (key, rank): hashlib.sha256(page[rank * 8192 : (rank + 1) * 8192]).hexdigest()
        for key, page in zip(TRUNK[:24], pages, strict=True)
        for rank in range(2)
    }
    assert read == {where: written[where] for where in read}
    assert len(read) == 48


def test_the_guide_keeps_a_prefix_and_lets_it_go(clients: Clients, service: Service) -> None:
    names = run_example("def keep")
    client = clients.connect(service.urls["tcp"], token=service.token)
    pin_id = names["keep"](client, NAME, TRUNK[:16], 5)
    assert isinstance(pin_id, str)
    assert client.evict(NAME, TRUNK[:16]).kept == 16
    with pytest.raises(Gone):
        client.renew(pin_id, 1000)
    client.unpin(pin_id)
    client.unpin(pin_id)
    assert names["let_go"](client, NAME, TRUNK[:16], 10) == 6
    assert client.lookup(NAME, TRUNK[:16]).pages.host == 16


def test_the_guide_waits_as_long_as_it_says(clients: Clients, service: Service) -> None:
    best_effort = run_example("def best_effort")["best_effort"]
    client = clients.connect(service.urls["unix"], token=service.token)
    client.prefetch(NAME, TRUNK, request_id="best")
    assert best_effort(client, "best", 10.0).outcome == "complete"
    client.cancel("best")
