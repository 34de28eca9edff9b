"""What a real service writes about its jobs."""

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from faults.stored_pages import StoredPages
from support.live import make_keys

KEYS = make_keys(6)
TOKEN = "correct-horse-battery"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def _ask(url: str, request_id: str, **headers: str) -> dict[str, Any]:
    body = {"model": "m", "keys": [key.hex() for key in KEYS], "request_id": request_id, "wait_ms": 10_000}
    answer = httpx2.post(
        f"{url}/v1/prefetch", json=body, headers={"Authorization": f"Bearer {TOKEN}", **headers}, timeout=30
    )
    assert answer.status_code == 200
    parsed: dict[str, Any] = answer.json()
    return parsed


@pytest.mark.parametrize("form", ["json", "text"])
def test_one_line_for_each_job(tmp_path: Path, form: str) -> None:
    (tmp_path / "token").write_text(TOKEN)
    pages = StoredPages.make(tmp_path, server=f'port = 0\ntoken_file = "{tmp_path}/token"')
    pages.store(KEYS[:4])
    with pages.serving("--log-format", form) as service:
        answer = _ask(service.url, "traced", traceparent=f"00-{TRACE}-00f067aa0ba902b7-01")
        _ask(service.url, "untraced")
        _ask(service.url, "untraced")  # the same job: no other line
        assert service.stop() == 0
    log = "".join(service.log)
    assert TOKEN not in log
    assert not [key for key in KEYS if key.hex() in log]
    lines = [line for line in service.log if "prefetch ended" in line]
    assert len(lines) == 2
    if form == "text":
        assert f"request_id=traced trace_id={TRACE} model=m tenant=default outcome=partial" in lines[0]
        assert 'request_id=untraced trace_id="" model=m' in lines[1]
        return
    for line in service.log:
        json.loads(line)
    traced, untraced = map(json.loads, lines)
    assert (traced["request_id"], traced["trace_id"], traced["level"]) == ("traced", TRACE, "INFO")
    assert (untraced["request_id"], untraced["trace_id"]) == ("untraced", "")
    for name in ("requested", "host", "stored", "restorable", "granted", "ready"):
        assert traced[name] == answer["pages"][name]
    assert traced["shortfall"] == answer["shortfall"] == {"not_stored": 2}
    assert traced["ms"] == answer["timing_ms"]


def test_lines_of_jobs_can_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    pages = StoredPages.make(tmp_path, server=f'port = 0\ntoken_file = "{tmp_path}/token"')
    with pages.serving("--log-level", "warning") as service:
        _ask(service.url, "r")
        assert service.stop() == 0
    assert not [line for line in service.log if "prefetch ended" in line]
