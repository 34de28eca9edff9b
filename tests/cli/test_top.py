"""`forestage top`: what it draws, that it fits, and that it leaves the terminal as it was."""

import copy
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faults.stored_pages import StoredPages
from forestage.cli.main import main
from forestage.cli.top_frame import draw_frame
from forestage_client import Client
from support.live import make_keys
from support.running import Running

KEYS = [key.hex() for key in make_keys(8)]
_CODE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    pages = StoredPages.make(tmp_path_factory.mktemp("top"))
    pages.store([bytes.fromhex(key) for key in KEYS[:5]])
    with pages.serving("--grace", "1") as running, Client(running.url) as client:
        client.prefetch("m", KEYS, request_id="short-one", wait_ms=10_000)
        yield running
        assert running.stop() == 0


def _feed(service: Running) -> dict[str, Any]:
    with Client(service.url) as client:
        return json.loads(json.dumps(dict(client.status())))  # type: ignore[no-any-return]


def test_one_picture(service: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")  # of what the tests run in
    assert main(["top", "--url", service.url]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "storage hicache-file: up" in said
    assert "leased 5" in said
    assert "ready 5 of 8 pages (62.5%), not_stored 3" in said
    assert re.search(r"short-one +m +partial .* 5 of 8 pages, not_stored 3", said)
    assert main(["top", "--url", service.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finished"][0]["request_id"] == "short-one"
    assert main(["top", "--url", "http://127.0.0.1:9"]) == 1


def test_the_strip_has_the_state_that_most_slots_of_a_letter_have(service: Running) -> None:
    feed = _feed(service)
    part = feed["pool"][0]
    part["map"]["cells"] = [[4, 0, 0, 0, 0]] * 50 + [[1, 0, 3, 0, 0]] * 30 + [[2, 0, 0, 2, 0]] * 20
    strip = draw_frame(feed, 100, 50, colour=False)[5]
    assert strip == "." * 50 + "#" * 30 + "+" * 20
    assert draw_frame(feed, 50, 50, colour=False)[5] == "." * 25 + "#" * 15 + "+" * 10


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("height", [1, 10, 100])
def test_it_fits(service: Running, width: int, height: int) -> None:
    feed = _feed(service)
    job = {
        **copy.deepcopy(feed["finished"][0]),
        "state": "loading",
        "contiguous": 3,
        "age_ms": 1e9,
        "request_id": "r" * 128,
    }
    feed["running"], feed["running_not_shown"] = [job] * 24, 1000
    feed["pool"] = feed["pool"] * 9
    for colour in (False, True):
        lines = draw_frame(feed, width, height, colour=colour)
        assert len(lines) <= height
        assert all(len(_CODE.sub("", line)) <= width for line in lines)
        assert draw_frame(feed, width, height, colour=False) == [_CODE.sub("", line) for line in lines]


def test_nothing_in_the_feed_can_steer_the_terminal(service: Running) -> None:
    feed = _feed(service)
    feed["finished"][0]["request_id"] = "\x1b]0;title\x07\nnext"
    feed["version"] = "\x9b31m\u202e"
    drawn = "".join(draw_frame(feed, 120, 100, colour=False))
    assert drawn.isprintable()


def test_on_a_terminal_it_goes_on_until_interrupted(service: Running) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "forestage", "top", "--url", service.url, "--interval", "0.1"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background has it ignored
    try:
        process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env={**os.environ, "TERM": "xterm"})
    finally:
        signal.signal(signal.SIGINT, before)
    os.close(theirs)
    try:
        said = _read(ours, lambda said: said.count(b"\x1b[H") >= 3)
        assert said.startswith(b"\x1b[?1049h")
        process.send_signal(signal.SIGINT)
        said = _read(ours, lambda said: b"\x1b[?1049l" in said)
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        assert process.stderr is not None
        process.stderr.close()
        os.close(ours)


def _read(terminal: int, enough: Any, deadline_s: float = 30.0) -> bytes:
    said, deadline = b"", time.monotonic() + deadline_s
    while not enough(said):
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, said
        said += os.read(terminal, 1 << 16)
    return said


def test_a_service_that_goes_away_is_said_and_waited_for(tmp_path: Path) -> None:
    pages = StoredPages.make(tmp_path)
    ours, theirs = pty.openpty()
    with pages.serving("--grace", "1") as running:
        command = [sys.executable, "-m", "forestage", "top", "--url", running.url, "--interval", "0.1"]
        process = subprocess.Popen(command, stdout=theirs, env={**os.environ, "TERM": "xterm"})
        os.close(theirs)
        try:
            _read(ours, lambda said: b"storage" in said)
            assert running.stop() == 0
            _read(ours, lambda said: b"no answer" in said)
        finally:
            process.terminate()
            process.wait(20)
            os.close(ours)
