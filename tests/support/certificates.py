"""A certificate authority for one test, with a certificate for a server and one for a client."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from support.redis_process import give_up

__all__ = ["Certificates", "make_certificates"]

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files. The server's is good for `localhost` and 127.0.0.1."""

    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def make_certificates(folder: Path) -> Certificates:
    """Make all of them in `folder` with the openssl command."""
    if shutil.which("openssl") is None:
        give_up("no openssl command: apt-get install openssl")
    folder.mkdir(parents=True, exist_ok=True)
    made = Certificates(*(folder / name for name in ("ca.crt", "server.crt", "server.key", "client.crt", "client.key")))
    ca_key = folder / "ca.key"
    is_ca = ("-addext", "basicConstraints=critical,CA:TRUE")
    _openssl("req", "-x509", *_KEY, "-keyout", ca_key, "-out", made.ca, "-subj", "/CN=test authority", *is_ca)
    by_ca = ("-CA", made.ca, "-CAkey", ca_key, "-addext", "basicConstraints=CA:FALSE")
    names = ("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    server = ("-keyout", made.server_key, "-out", made.server, "-subj", "/CN=localhost")
    _openssl("req", "-x509", *_KEY, *server, *by_ca, *names)
    client = ("-keyout", made.client_key, "-out", made.client, "-subj", "/CN=client")
    _openssl("req", "-x509", *_KEY, *client, *by_ca)
    return made


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
