"""SIGHUP: tokens are exchanged whole or not at all, at any moment, and it never ends or opens a service."""

import itertools
import os
import random
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from faults.stored_pages import StoredPages
from support.configs import write_config
from support.live import make_keys
from support.running import Running, refusing, running

KEYS = make_keys(4)
#: Loading the machine's certificates takes longer than many a test.
BARE = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
TENANTS = """
[[tokens]]
token_file = "{0}/reader"
role = "read"
[[tenants]]
name = "a"
min_share = 0.25
token_file = "{0}/a"
"""


def _until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def _write(folder: Path, **tokens: str) -> None:
    for name, token in tokens.items():
        new = folder / f".{name}"
        new.write_text(token)
        new.rename(folder / name)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    _write(tmp_path, any="any-1", reader="reader-1", a="a-1")
    server = f'port = 0\ntoken_file = "{tmp_path}/any"'
    return write_config(tmp_path, server=server, more=TENANTS.format(tmp_path))


@pytest.fixture
def service(config: Path) -> Iterator[Running]:
    with running(config) as service:
        yield service
        assert service.stop() == 0
    assert not [line for line in service.log if "Traceback" in line]
    assert not [line for line in service.log for n in "123" if f"any-{n}" in line or f"a-{n}" in line]


def _status(service: Running, token: str, path: str = "/v1/info") -> int:
    return httpx2.get(
        f"{service.url}{path}", headers={"Authorization": f"Bearer {token}"}, timeout=20, verify=BARE
    ).status_code


def _reload(service: Running, says: str) -> None:
    lines = [line for line in service.log if says in line]
    service.process.send_signal(signal.SIGHUP)
    _until(lambda: len([line for line in service.log if says in line]) > len(lines))


def test_tokens_are_taken_anew(tmp_path: Path, config: Path, service: Running) -> None:
    assert [_status(service, token) for token in ("any-1", "reader-1", "a-1", "any-2")] == [200, 200, 200, 401]
    _write(tmp_path, any="any-2", a="a-2")
    assert _status(service, "any-2") == 401  # nobody has asked for it
    _reload(service, "took the tokens of the configuration anew: 3")
    assert [_status(service, token) for token in ("any-1", "any-2", "a-1", "a-2")] == [401, 200, 401, 200]
    # What the file says of roles counts, too; what needs a restart is named, without its value.
    text = config.read_text().replace('role = "read"', 'role = "write"').replace("min_share = 0.25", "min_share = 0.5")
    config.write_text(text.replace('kind = "file"', 'kind = "file"\nprobe_timeout_ms = 77777'))
    evict = f"{service.url}/v1/pins/p"
    as_reader = {"Authorization": "Bearer reader-1"}
    assert httpx2.delete(evict, headers=as_reader, verify=BARE).status_code == 403
    _reload(service, "taken only by a restart: storage.probe_timeout_ms, tenants")
    assert httpx2.delete(evict, headers=as_reader, verify=BARE).status_code == 204
    assert not [line for line in service.log if "77777" in line]
    # A tenant that is new waits for a restart, and so does its token.
    _write(tmp_path, b="b-1")
    config.write_text(config.read_text() + f'\n[[tenants]]\nname = "b"\ntoken_file = "{tmp_path}/b"\n')
    _reload(service, "taken only by a restart")
    assert (_status(service, "b-1"), _status(service, "a-2")) == (401, 200)


def test_a_mistake_changes_nothing(tmp_path: Path, config: Path, service: Running) -> None:
    sound = config.read_text()
    refused = "the configuration was not taken anew, tokens stay as they were: "
    for text, says in [
        ("[server", f"{config}: is not valid TOML"),
        (sound.replace("min_share", "mni_share"), "tenants[0].mni_share: unknown key"),
        (sound.replace(f'"{tmp_path}/a"', '"/nowhere"'), "tenants[0].token_file: "),
        (sound.replace(f'"{tmp_path}/a"', f'"{tmp_path}/any"'), "tenants[0].token_file: "),
        (
            sound.partition("[server]")[0]
            + "[server]\nport = 0\n[storage]"
            + sound.partition("[storage]")[2].replace(TENANTS.format(tmp_path).strip(), ""),
            "it names no token",
        ),
    ]:
        config.write_text(text)
        _write(tmp_path, any="any-3")
        _reload(service, refused)
        (line,) = [line for line in service.log if refused in line]
        assert says in line, line
        service.log.clear()
        assert [_status(service, token) for token in ("any-1", "reader-1", "a-1", "any-3")] == [200, 200, 200, 401]
        _write(tmp_path, any="any-1")
    config.unlink()
    _reload(service, refused)
    assert _status(service, "any-1") == 200


def test_a_listener_whose_token_is_gone_is_closed(tmp_path: Path, service: Running) -> None:
    pages = {"model": "m", "keys": [KEYS[0].hex()]}
    headers = {"Authorization": "Bearer reader-1"}
    with httpx2.stream("GET", f"{service.url}/v1/events", headers=headers, timeout=30, verify=BARE) as events:
        lines = events.iter_lines()
        assert next(lines) == "event: reset"
        _write(tmp_path, reader="reader-2")
        _reload(service, "took the tokens")
        admin = {"Authorization": "Bearer any-1"}
        write = httpx2.post(f"{service.url}/v1/writes", json=pages, headers=admin, verify=BARE).json()
        httpx2.post(f"{service.url}/v1/writes/{write['id']}/commit", headers=admin, verify=BARE)
        assert not [line for line in lines if "stored" in line]


def test_reloads_at_random_moments_under_load(tmp_path: Path, service: Running) -> None:
    """At every moment one whole set of tokens is in effect: a caller with both of them is always let in by one."""
    randomness = random.Random(5)
    over = threading.Event()
    wrong: list[object] = []

    def ask() -> None:
        body = {"model": "m", "keys": [key.hex() for key in KEYS], "wait_ms": 50}
        with httpx2.Client(base_url=service.url, timeout=30, verify=BARE) as http:
            while not over.is_set():
                for number in itertools.cycle("12"):
                    any_token, a_token = ({"Authorization": f"Bearer {who}-{number}"} for who in ("any", "a"))
                    first = http.post("/v1/prefetch", json=body, headers=any_token).status_code
                    if first == 200:
                        break
                    if first not in (202, 401):
                        wrong.append(first)
                    if over.is_set():
                        return
                if http.get("/v1/info", headers=a_token).status_code not in (200, 401):
                    wrong.append("info")
                if http.get("/healthz").status_code != 200:
                    wrong.append("health")

    callers = [threading.Thread(target=ask) for _ in range(3)]
    for caller in callers:
        caller.start()
    config = tmp_path / "forestage.toml"
    sound = config.read_text()
    for turn in range(40):
        number = randomness.choice("12")
        _write(tmp_path, any=f"any-{number}", a=f"a-{number}")
        bad = turn % 3 == 1
        config.write_text(sound + "\n[nonsense]\n" if bad else sound)
        for _ in range(randomness.randrange(1, 4)):
            service.process.send_signal(signal.SIGHUP)
            time.sleep(randomness.uniform(0, 0.03))
    config.write_text(sound)
    _write(tmp_path, any="any-1", a="a-1")
    _reload(service, "took the tokens")
    _until(lambda: _status(service, "any-1") == 200 and _status(service, "a-1") == 200)
    assert _status(service, "any-2") == 401
    over.set()
    for caller in callers:
        caller.join(30)
    assert wrong == []


@pytest.mark.parametrize("seed", range(3))
def test_hangups_during_start_and_stop(tmp_path: Path, config: Path, seed: int) -> None:
    randomness = random.Random(seed)
    with refusing(config) as process:
        _until(lambda: _catches_stops(process.pid))
        began = time.monotonic()
        stop_after = randomness.uniform(0.2, 2.0)
        while process.poll() is None:
            process.send_signal(signal.SIGHUP)
            time.sleep(randomness.uniform(0, 0.02))
            if time.monotonic() - began > stop_after:
                process.send_signal(randomness.choice((signal.SIGTERM, signal.SIGINT)))
            assert time.monotonic() - began < 20
        _, log = process.communicate(timeout=5)
    assert process.returncode == 0, log
    assert "Traceback" not in log


def _catches_stops(pid: int) -> bool:
    """Say whether the process has handlers of its own; it ignores hangups before."""
    lines = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    return all(int(lines["SigCgt"], 16) >> (signum - 1) & 1 for signum in (signal.SIGTERM, signal.SIGINT))


def test_a_reload_that_hangs_holds_up_neither_answers_nor_the_end(tmp_path: Path) -> None:
    _write(tmp_path, any="any-1")
    pages = StoredPages.make(tmp_path, server=f'port = 0\ntoken_file = "{tmp_path}/any"')
    with running(pages.config, "--grace", "2") as service:
        (tmp_path / "any").unlink()
        os.mkfifo(tmp_path / "any")  # nobody will ever write to it
        service.process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert _status(service, "any-1") == 200
        began = time.monotonic()
        assert service.stop() == 0
        assert time.monotonic() - began < 4
