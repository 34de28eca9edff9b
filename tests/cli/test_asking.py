"""The commands that ask a running service: what they print, and the exit codes that scripts rely on."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from faults.stored_pages import StoredPages
from forestage.cli.main import main
from forestage_client import Client
from support.live import make_keys
from support.running import Running

TOKEN = "t0ken"
KEYS = [key.hex() for key in make_keys(6)]


@dataclass
class Asked:
    """A service, and how commands reach it."""

    service: Running
    pages: StoredPages
    url: str
    token_file: str

    @property
    def door(self) -> list[str]:
        return ["--url", self.url, "--token-file", self.token_file]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "token").write_text(f"{TOKEN}\n")
    server = f'port = 0\ntoken_file = "{folder}/token"'
    pages = StoredPages.make(folder, server=server, storage="stall_timeout_ms = 60000")
    pages.store([bytes.fromhex(key) for key in KEYS[:5]])
    with pages.serving("--grace", "1") as service:
        yield Asked(service, pages, service.url, str(folder / "token"))
        assert service.stop() == 0


Captured = pytest.CaptureFixture[str]


def _run(capsys: Captured, *words: str) -> tuple[int, str, str]:
    code = main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_prefetch(asked: Asked, capsys: Captured, tmp_path: Path) -> None:
    complete = _run(capsys, "prefetch", *asked.door, "--model", "m", "--request-id", "one", *KEYS[:3])
    assert (complete[0], complete[2]) == (0, "")
    lines = complete[1].splitlines()
    assert lines[0] == "one  complete: 3 of 3 pages ready"
    assert lines[1].split() == ["requested", "3", "pages", "48", "tokens"]
    assert re.fullmatch(r"  slots: 3 kv; lease [0-9a-f]{32} for \d+ ms", lines[-1])

    (tmp_path / "keys").write_text(json.dumps(KEYS))
    partial = _run(capsys, "prefetch", *asked.door, "--model", "m", "--keys", str(tmp_path / "keys"), "--json")
    job = json.loads(partial[1])
    assert (partial[0], job["outcome"], job["pages"]["ready"], job["shortfall"]) == (3, "partial", 5, {"not_stored": 1})

    words = ["prefetch", *asked.door, "--model", "m", "--device-pages", "5", *KEYS]
    miss = _run(capsys, *words)
    assert (miss[0], "short by        1  not_stored" in miss[1]) == (4, True)
    declined = _run(capsys, "prefetch", *asked.door, "--model", "m", "--min-pages", "9", "--device-pages", "4", *KEYS)
    assert declined[0] in (3, 4)


def test_keys_from_stdin(asked: Asked, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    class _Stdin:
        def read(self) -> str:
            return f"{KEYS[0]}\n{KEYS[1]}, {KEYS[2]}\n"

    monkeypatch.setattr(sys, "stdin", _Stdin())
    code, out, _ = _run(capsys, "lookup", *asked.door, "--model", "m", "--keys", "-", "--json")
    assert (code, json.loads(out)["pages"]["requested"]) == (0, 3)


def test_lookup(asked: Asked, capsys: Captured) -> None:
    code, out, errors = _run(capsys, "lookup", *asked.door, "--model", "m", *KEYS)
    assert (code, errors) == (0, "")
    assert [line.split()[:2] for line in out.splitlines()] == [
        ["requested", "6"],
        ["host", out.splitlines()[1].split()[1]],
        ["stored", "5"],
        ["restorable", "5"],
        ["grantable", "5"],
    ]


def test_status_and_pool(asked: Asked, capsys: Captured) -> None:
    code, out, _ = _run(capsys, "status", *asked.door)
    assert code == 0
    assert out.startswith("forestage ")
    assert "  storage   hicache-file: up\n" in out
    assert "  model     m: pages of 16 tokens; slots: 64 kv of 1 x 4096 bytes\n" in out
    code, out, _ = _run(capsys, "status", *asked.door, "--json")
    assert (code, json.loads(out)["ready"], json.loads(out)["models"]) == (0, True, ["m"])

    main(["prefetch", *asked.door, "--model", "m", *KEYS[:3]])
    capsys.readouterr()
    code, out, _ = _run(capsys, "pool", *asked.door)
    assert code == 0
    assert re.search(r"  m kv: 64 slots of 4096 bytes; \d+ resident, \d+ free", out)
    code, out, _ = _run(capsys, "pool", *asked.door, "--json")
    shown = json.loads(out)
    assert sum(shown["states"]["m"]["kv"].values()) == shown["regions"]["m"]["kv"]["slots"] == 64


def test_what_the_service_refuses(asked: Asked, capsys: Captured, tmp_path: Path) -> None:
    unknown = _run(capsys, "prefetch", *asked.door, "--model", "other", KEYS[0])
    assert (unknown[0], unknown[1]) == (1, "")
    assert unknown[2].startswith("forestage: ")
    assert "no model of this name" in unknown[2]
    (tmp_path / "token").write_text("wrong")
    wrong = _run(capsys, "status", "--url", asked.url, "--token-file", str(tmp_path / "token"))
    assert wrong[0] == 1
    assert "token" in wrong[2]
    none = _run(capsys, "pool", "--url", asked.url)
    assert none[0] == 1
    bad = _run(capsys, "prefetch", *asked.door, "--model", "m", "not-hex")
    assert bad[0] in (1, 2)
    for code, out, errors in (unknown, wrong, none, bad):
        assert (out, len(errors.splitlines())) == ("", 1), code
        assert TOKEN not in errors


def test_what_makes_no_sense(asked: Asked, capsys: Captured, tmp_path: Path) -> None:
    for words in (
        ["lookup", *asked.door, "--model", "m"],
        ["lookup", *asked.door, "--model", "m", "--keys", str(tmp_path / "missing")],
        ["status", "--url", asked.url, "--token-file", str(tmp_path / "missing")],
        ["status", "--url", "gopher://nowhere"],
    ):
        code, out, errors = _run(capsys, *words)
        assert (code, out) == (2, ""), words
        assert errors.startswith("forestage: ")
        assert len(errors.splitlines()) == 1


def test_nobody_there(capsys: Captured) -> None:
    code, out, errors = _run(capsys, "status", "--url", "http://127.0.0.1:9")
    assert (code, out) == (1, "")
    assert errors.startswith("forestage: ")


def test_an_interrupted_prefetch_is_cancelled(asked: Asked) -> None:
    keys = [bytes.fromhex(key) for key in KEYS[3:5]]
    held = make_keys(2, "held")
    asked.pages.store(held)
    asked.pages.hang(held)
    words = ["prefetch", *asked.door, "--model", "m", "--request-id", "held", *[key.hex() for key in held]]
    # A shell that runs the tests in the background may have had SIGINT ignored, and that is inherited.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "forestage", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with Client(asked.url, token=TOKEN, timeout_s=10) as client:
        end = time.monotonic() + 10
        while 'state="loading"} 1' not in client.metrics():
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=10)
        assert (process.returncode, out, errors) == (130, "", "")
        assert 'forestage_jobs{state="loading"} 0' in client.metrics()
        asked.pages.release()
        assert client.prefetch("m", keys, wait_ms=5000).outcome == "complete"


def test_a_reader_of_the_output_that_has_gone(asked: Asked) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "forestage", "pool", *asked.door]
    process = subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (1, "")
