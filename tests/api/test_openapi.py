"""The OpenAPI document is valid, and requests made from it at random break no promise of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.configs import write_config
from support.live import Live
from support.running import running

SCHEMATHESIS = str(Path(sys.executable).with_name("schemathesis"))


@pytest.mark.timeout(300)
def test_random_requests(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    server = f'port = 0\ntoken_file = "{tmp_path}/token"'
    # A random wait for a write that nobody commits ends with the write, before the client's own patience does.
    with running(write_config(tmp_path, server=server, writes="expire_ms = 1000", scheme="sglang")) as service:
        command = [
            SCHEMATHESIS,
            "run",
            f"{service.url}/openapi.json",
            "--max-examples=8",
            "--seed=1",
            "--checks=all",
            # Not every limit can be said in a schema: device_pages <= len(keys), max_pages.
            "--exclude-checks=positive_data_acceptance",
            "--exclude-path=/v1/events",  # has no end
            "--request-timeout=20",
            "--generation-database=none",
            "--no-color",
            "--header=Authorization: Bearer secret",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-6000:]
        assert service.stop() == 0
    assert not [line for line in service.log if "Traceback" in line]


async def test_the_document_names_every_route(service: Live) -> None:
    document = (await service.http.get("/openapi.json")).json()
    routes = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert routes == {
        ("POST", "/v1/prefetch"),
        ("GET", "/v1/prefetch/{request_id}"),
        ("DELETE", "/v1/prefetch/{request_id}"),
        ("POST", "/v1/prefetch/{request_id}/finish"),
        ("POST", "/v1/lookup"),
        ("POST", "/v1/leases"),
        ("POST", "/v1/leases/{lease_id}/renew"),
        ("DELETE", "/v1/leases/{lease_id}"),
        ("POST", "/v1/fills"),
        ("POST", "/v1/writes"),
        ("GET", "/v1/writes/{write_id}"),
        ("DELETE", "/v1/writes/{write_id}"),
        ("POST", "/v1/writes/{write_id}/commit"),
        ("POST", "/v1/pins"),
        ("DELETE", "/v1/pins/{pin_id}"),
        ("POST", "/v1/evict"),
        ("POST", "/v1/hash"),
        ("POST", "/v1/hints"),
        ("GET", "/v1/events"),
        ("GET", "/v1/pool"),
        ("GET", "/v1/models"),
        ("GET", "/v1/info"),
        ("GET", "/v1/status"),
        ("GET", "/v1/prefetch/{request_id}/timeline"),
        ("GET", "/healthz"),
        ("GET", "/readyz"),
        ("GET", "/metrics"),
    }
