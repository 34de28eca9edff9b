"""A router over three pods: score them with /v1/lookup, prefetch with a hint, then route. See docs/router.md.

Plays a trace of chat requests twice, each time against three fresh services on this machine over one L3 directory:
round robin without prefetch, and scored with prefetch. For every request the stand-in for an engine takes what is
in the pool of its pod (the hit), computes the rest, and writes that to the pool; it reaches L3 behind.

    python examples/router.py [--requests 400] [--trace FILE]
"""

import argparse
import asyncio
import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from forestage_client import AsyncClient
from forestage_client.pool_view import PoolView

__all__ = ["Pod", "generated_trace", "main", "read_trace", "route_round_robin", "route_scored"]

MODEL = "chat"
PAGE_TOKENS = 512  # of the trace's blocks
PAGE_BYTES = 4096  # stand-ins: a real page of so many tokens has megabytes
NUM_PODS = 3
TRACE = Path(__file__).resolve().parents[2] / "shared" / "data" / "traces" / "conversation-2000.jsonl"

# What a page costs, with computing it as the unit.
LOAD_COST = 0.2  # of bringing it from L3
BUSY_COST = 0.05  # of having it behind a page that the pod is busy with already
BUSY_DECAY = 0.9  # a request later so much of the work is still there


@dataclass
class Pod:
    """One service and its stand-in for an engine. `busy` are pages that it is at work on, roughly."""

    client: AsyncClient
    http: httpx2.AsyncClient
    view: PoolView
    busy: float = 0.0
    served: int = 0
    hits: int = 0
    loaded: int = 0

    async def cost(self, keys: Sequence[bytes]) -> float:
        """Return what it would cost to serve a prompt here."""
        pages = (await self.client.lookup(MODEL, keys)).pages
        computed, brought = pages.requested - pages.grantable, pages.grantable - min(pages.host, pages.grantable)
        return computed + LOAD_COST * brought + BUSY_COST * self.busy

    async def prefetch(self, message_id: str, keys: Sequence[bytes]) -> None:
        """Bring what L3 has of a prompt; return when it is there, or after as long as it is worth waiting."""
        payload = {"model": MODEL, "keys": [key.hex() for key in keys], "deadline_ms": 2000}
        action = {"action_id": "bring", "action_type": "prefetch", "action_version": "1.0", "payload": payload}
        envelope = {"protocol_version": "1.0", "message_id": message_id, "actions": [action]}
        answer = (await self.http.post("/v1/hints?wait_ms=2500", json=envelope)).raise_for_status()
        (told,) = answer.json()["actions"]
        if told["outcome"] != "rejected":
            self.loaded += told["pages"]["ready"] - told["pages"]["host"]

    async def serve(self, keys: Sequence[bytes]) -> None:
        """Be the engine: use what is in the pool, compute the rest and write it."""
        leased = await self.client.lease(MODEL, keys)
        self.hits += leased.pages.ready
        self.served += 1
        async with self.client.write(self.view, MODEL, keys) as writer:
            for page, key in enumerate(keys):
                writer.put("kv", page, (key * (PAGE_BYTES // len(key) + 1))[:PAGE_BYTES])
        if leased.lease is not None:
            await self.client.release(leased.lease.id)
        # In life the next turn comes seconds later; here it comes at once, so see that L3 has this one.
        await self.client.write_status(writer.write.id, wait_ms=10_000)


async def route_round_robin(pods: Sequence[Pod], number: int, keys: Sequence[bytes]) -> Pod:
    """Choose a pod without looking."""
    return pods[number % len(pods)]


async def route_scored(pods: Sequence[Pod], number: int, keys: Sequence[bytes]) -> Pod:
    """Choose the pod that can begin soonest, and have it bring what L3 has."""
    costs = await asyncio.gather(*(pod.cost(keys) for pod in pods))
    # Equal ones take turns, or the first pod would get every new conversation.
    best = min(range(len(pods)), key=lambda i: (costs[i], (i - number) % len(pods)))
    for pod in pods:
        pod.busy *= BUSY_DECAY
    pods[best].busy += len(keys)
    await pods[best].prefetch(f"request-{number}", keys)
    return pods[best]


def read_trace(path: Path, requests: int) -> list[list[bytes]]:
    """Read prompts as page keys. In this trace equal block ids mean equal prefixes, as page keys must."""
    with path.open() as lines:
        rows = [json.loads(line)["hash_ids"] for _, line in zip(range(requests), lines, strict=False)]
    return [_keys(row) for row in rows if len(set(row)) == len(row)]


def generated_trace(requests: int, seed: int = 1) -> list[list[bytes]]:
    """Make prompts of like shape: one system prompt, and conversations that come back with a longer history."""
    dice = random.Random(seed)
    conversations: list[list[int]] = []
    next_block = 1
    prompts = []
    for _ in range(requests):
        if conversations and dice.random() < 0.5:
            blocks = dice.choice(conversations[-60:])
        else:
            blocks = [0]
            conversations.append(blocks)
        new = dice.randint(2, 24)
        blocks.extend(range(next_block, next_block + new))
        next_block += new
        prompts.append(_keys(blocks))
    return prompts


def _keys(blocks: Sequence[int]) -> list[bytes]:
    return [hashlib.sha256(f"block {block}".encode()).digest() for block in blocks]


def _config(folder: Path, l3: Path, slots: int) -> str:
    return f"""
[server]
port = 0
[pool]
path = "{folder}/pool"
pin = "none"
[storage]
kind = "file"
[storage.file]
root = "{l3}"
[[models]]
name = "{MODEL}"
page_tokens = {PAGE_TOKENS}
[[models.components]]
name = "kv"
bytes = {PAGE_BYTES}
slots = {slots}
"""


def _start(folder: Path, l3: Path, slots: int) -> subprocess.Popen[str]:
    folder.mkdir(parents=True)
    (folder / "forestage.toml").write_text(_config(folder, l3, slots))
    command = [sys.executable, "-m", "forestage", "serve", "--config", str(folder / "forestage.toml")]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)


@asynccontextmanager
async def _pods(scratch: Path, slots: int) -> AsyncIterator[list[Pod]]:
    """Start the services over one L3; end them, each by its process, at the end."""
    started: list[subprocess.Popen[str]] = []
    try:
        started.extend(_start(scratch / f"pod{number}", scratch / "l3", slots) for number in range(NUM_PODS))
        async with AsyncExitStack() as stack:
            pods = []
            for number, process in enumerate(started):
                assert process.stdout is not None
                ready = (await asyncio.to_thread(process.stdout.readline)).split()
                if ready[:2] != ["forestage", "ready"]:
                    raise RuntimeError((scratch / f"pod{number}" / "log").read_text())
                client = await stack.enter_async_context(AsyncClient(ready[2], timeout_s=30))
                http = await stack.enter_async_context(httpx2.AsyncClient(base_url=ready[2], timeout=30))
                view = stack.enter_context(PoolView((await client.pool()).path, writable=True))
                pods.append(Pod(client, http, view))
            yield pods
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(timeout=30)
            assert process.stdout is not None
            process.stdout.close()


@dataclass
class _Played:
    """What one way of routing came to."""

    requested: int = 0
    pods: list[Pod] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def hits(self) -> int:
        return sum(pod.hits for pod in self.pods)

    def row(self, name: str) -> str:
        loaded, served = sum(pod.loaded for pod in self.pods), "/".join(str(pod.served) for pod in self.pods)
        share = 100 * self.hits / max(1, self.requested)
        cells = (f"{self.requested:>6}", f"{self.hits:>6}", f"{share:5.1f} %", f"{loaded:>12}", f"{served:>14}")
        return f"{name:<34}{'  '.join(cells)}  {self.seconds:5.1f} s"


async def _play(prompts: Sequence[Sequence[bytes]], scratch: Path, slots: int, scored: bool) -> _Played:
    played = _Played()
    route = route_scored if scored else route_round_robin
    async with _pods(scratch, slots) as pods:
        began = time.monotonic()
        for number, keys in enumerate(prompts):
            pod = await route(pods, number, keys)
            await pod.serve(keys)
            played.requested += len(keys)
        played.seconds, played.pods = time.monotonic() - began, pods
    return played


def main() -> int:
    """Play both ways and compare them; return the exit code: 1 if routing by score found no more."""
    parser = argparse.ArgumentParser(description="Route a trace over three pods, with and without Forestage's help.")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--slots", type=int, default=2000, help="pages of each pod's pool")
    parser.add_argument("--trace", type=Path, default=TRACE, help="JSON lines with hash_ids; generated if not there")
    arguments = parser.parse_args()
    there = arguments.trace.is_file()
    prompts = read_trace(arguments.trace, arguments.requests) if there else generated_trace(arguments.requests)
    what = arguments.trace.name if there else "a generated trace"
    print(f"{len(prompts)} requests of {what} over {NUM_PODS} pods of {arguments.slots} pages\n")
    print(f"{'':<34}{'pages':>6}  {'hits':>6}  {'':7}  {'of those L3':>12}  {'requests a pod':>14}  {'time':>7}")
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 1 << 30
    results = []
    for name, scored in (("round robin, no prefetch", False), ("scored by lookup, with prefetch", True)):
        with tempfile.TemporaryDirectory(prefix="forestage-router-", dir=memory if roomy else None) as scratch:
            results.append(asyncio.run(_play(prompts, Path(scratch), arguments.slots, scored)))
        print(results[-1].row(name), flush=True)
    return 0 if results[1].hits > results[0].hits else 1


if __name__ == "__main__":
    raise SystemExit(main())
