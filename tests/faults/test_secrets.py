"""Whatever goes wrong, no secret is in anything the service says: answers, metrics, logs, the printed configuration."""

import json
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, quote_plus

import httpx2
import pytest

from support.configs import write_config
from support.live import make_keys
from support.running import running

PASSWORD, KEY_PASSWORD = "pa$s/word:of@redis", "pass phrase+of=the key"
TOKENS = {
    "any": "token-of-everybody",
    "reader": "token-of-the-reader",
    "a": "token-of-tenant-a",
    "next": "token-to-come",
}
BARE = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _spellings(secret: str) -> set[str]:
    quoted = {quote(secret, safe=""), quote_plus(secret), json.dumps(secret)[1:-1]}
    return {secret, *quoted, *(text.lower() for text in quoted)}


SECRETS = set().union(*(_spellings(secret) for secret in (PASSWORD, KEY_PASSWORD, *TOKENS.values())))


def _requests(http: httpx2.Client) -> Iterator[httpx2.Response]:
    keys = [key.hex() for key in make_keys(2)]
    good = {"model": "m", "keys": keys}
    bodies: list[dict[str, object]] = [
        {"json": good},
        {"json": {**good, "wait_ms": 3000, "request_id": "r"}},
        {"json": {**good, "request_id": PASSWORD}},
        {"json": {**good, "tenant": TOKENS["reader"]}},
        {"json": {"model": TOKENS["any"], "keys": keys}},
        {"json": {**good, TOKENS["a"]: 1}},
        {"json": {"model": "m", "keys": [TOKENS["a"]]}},
        {"content": f'{{"model": "{TOKENS["any"]}'.encode()},
        {"content": b"\xff", "headers": {"Content-Type": "application/msgpack"}},
        {"content": b"x", "headers": {"Content-Type": "text/plain"}},
    ]
    for path in ("prefetch", "lookup", "leases", "pins", "writes", "evict", "hash", "hints"):
        for body in bodies:
            yield http.post(f"/v1/{path}", **body)  # type: ignore[arg-type]
    for path in ("info", "models", "pool", "status", "prefetch/r", "prefetch/r/timeline", "writes/w"):
        yield http.get(f"/v1/{path}")
    for path in ("/metrics", "/healthz", "/readyz", "/openapi.json", "/", f"/{TOKENS['any']}", f"/v1/{TOKENS['a']}"):
        yield http.get(path)
        yield http.put(path)


def _every_answer(url: str) -> Iterator[httpx2.Response]:
    wrong = [f"Bearer {TOKENS['any']}x", f"Basic {TOKENS['any']}", TOKENS["any"], f"Bearer {TOKENS['next']}", ""]
    for value in (*(f"Bearer {TOKENS[who]}" for who in ("any", "reader", "a")), *wrong):
        headers = {"Authorization": value, "traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
        with httpx2.Client(base_url=url, headers=headers, timeout=30, verify=BARE) as http:
            yield from _requests(http)


def _key(folder: Path) -> Path:
    """Make a private key that only its pass phrase opens, with a certificate behind it in the same file."""
    path = folder / "client.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -days 2 -subj /CN=client -keyout"
    command = ["openssl", *words.split(), str(path), "-out", str(path) + ".crt", "-passout", f"pass:{KEY_PASSWORD}"]
    subprocess.run(command, check=True, capture_output=True)
    path.write_text(path.read_text() + Path(str(path) + ".crt").read_text())
    return path


def _no_secret(text: str, where: str) -> None:
    found = [secret for secret in SECRETS if secret in text]
    assert not found, f"{where} shows {found}: {text[:300]}"


def _quoted_by_the_caller(answer: httpx2.Response) -> bool:
    """Say whether the caller itself sent a secret in another place than the header for it: it may be named back."""
    request = answer.request
    sent = request.url.path + request.content.decode("utf-8", "replace")
    return any(secret in sent for secret in SECRETS)


@pytest.mark.parametrize(("form", "scheme"), [("json", "redis"), ("text", "rediss")])
def test_nothing_that_is_said_holds_a_secret(tmp_path: Path, form: str, scheme: str) -> None:
    for name, token in TOKENS.items():
        (tmp_path / name).write_text(token)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never says a word
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        user = f"me:{quote(PASSWORD, safe='')}"
        query = "" if scheme == "redis" else f"?ssl_keyfile={_key(tmp_path)}&ssl_password={quote_plus(KEY_PASSWORD)}"
        url = f"{scheme}://{user}@{place}/0{query}"
        config = write_config(
            tmp_path,
            server=f'port = 0\ntoken_file = "{tmp_path}/any"',
            storage='kind = "redis"\nprobe_timeout_ms = 50\nstall_timeout_ms = 50',
            more=f'[storage.redis]\nurl = "{url}"\n[[tokens]]\nrole = "read"\ntoken_file = "{tmp_path}/reader"\n'
            f'[[tenants]]\nname = "a"\ntoken_file = "{tmp_path}/a"\n',
        )
        shown = subprocess.run(
            [sys.executable, "-m", "forestage", "config", "--config", str(config)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "****" in shown.stdout
        _no_secret(shown.stdout + shown.stderr, "forestage config")
        with running(config, "--log-level", "debug", "--log-format", form) as service:
            _no_secret(service.ready, "the ready line")
            for answer in _every_answer(service.url):
                if not _quoted_by_the_caller(answer):
                    _no_secret(answer.text + repr(answer.headers), f"{answer.request.method} {answer.request.url}")
                else:
                    _no_secret(repr(answer.headers), "headers")
            (tmp_path / "any").write_text(TOKENS["next"])
            service.process.send_signal(signal.SIGHUP)
            end = time.monotonic() + 20
            while not [line for line in service.log if "took the tokens" in line]:
                assert time.monotonic() < end
                time.sleep(0.01)
            for answer in _every_answer(service.url):
                assert answer.status_code
            (tmp_path / "any").write_text("two words")
            service.process.send_signal(signal.SIGHUP)
            while not [line for line in service.log if "not taken anew" in line]:
                assert time.monotonic() < end
                time.sleep(0.01)
            assert service.stop() == 0
        assert len(service.log) > 5
        _no_secret("".join(service.log), "the log")


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:{0}@",
        "redis://me:{0}@host:port/0",
        "redis://me:{0}@host:1/db",
        "http://me:{0}@host:1/0",
        "redis://me:{0}@host:1/0?password={0}&x=1",
        "rediss://me:{0}@host:1/0?ssl_password={0}",
        "redis://me:{0} @host:1/0",
    ],
)
def test_a_refused_url_is_not_quoted(tmp_path: Path, url: str) -> None:
    secret = "s3cret-of-redis"
    config = write_config(
        tmp_path, storage='kind = "redis"', more=f'[storage.redis]\nurl = "{url.format(secret)}"\n', name="m"
    )
    for environ in ({}, {"FORESTAGE_STORAGE__REDIS__URL": url.format(secret)}):
        done = subprocess.run(
            [sys.executable, "-m", "forestage", "config", "--config", str(config)],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), **environ},
        )
        assert secret not in done.stdout + done.stderr
        assert done.returncode in (0, 2)
