"""A service in this process, on a real socket, over a storage that the test holds in its hand."""

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from forestage import __version__
from forestage.api.app import create_app
from forestage.api.context import Context
from forestage.assembly import Assembly, assemble, pool_settings
from forestage.config import Config
from forestage.core.audit import check_integrity
from forestage.pool.file import PoolFile
from forestage.storage.memory import MemoryStorage
from forestage.storage.wrap import FaultyStorage
from forestage_client import AsyncClient
from forestage_client.pool_view import PoolView

__all__ = ["PAGE_BYTES", "Live", "content", "hybrid", "kv_only", "live", "make_keys"]

PAGE_BYTES = 4096


def make_keys(count: int, chain: str = "a") -> list[bytes]:
    """Page keys that are equal for equal chains."""
    return [hashlib.sha256(f"{chain}|{i}".encode()).digest() for i in range(count)]


def content(key: bytes, component: str, size: int = PAGE_BYTES) -> bytes:
    """Return the bytes of a page: any misplaced, stale or half-written one shows."""
    digest = hashlib.sha256(component.encode() + key).digest()
    return (digest * (size // len(digest) + 1))[:size]


def kv_only(slots: int) -> dict[str, Any]:
    return {"name": "m", "page_tokens": 16, "components": [{"name": "kv", "bytes": PAGE_BYTES, "slots": slots}]}


def hybrid(slots: int, states: int, window: int = 1) -> dict[str, Any]:
    model = kv_only(slots)
    tail = {"name": "state", "bytes": PAGE_BYTES, "slots": states, "covers": "tail", "window": window}
    return {**model, "components": [*model["components"], tail]}


@dataclass
class Live:
    """What a test needs of the running service."""

    parts: Assembly
    storage: FaultyStorage
    memory: MemoryStorage
    port: int
    client: AsyncClient
    context: Context
    app: Any

    def store(self, keys: Sequence[bytes], states: Sequence[int] = (), model: str = "m") -> None:
        """Put pages into L3, and states at prefix lengths."""
        layout = self.parts.service.engine.pools[model].layout
        for key in keys:
            self.memory.put(layout, 0, key, [content(key, "kv")])
        for length in states:
            self.memory.put(layout, 1, keys[length - 1], [content(keys[length - 1], "state")])

    async def quiet(self) -> None:
        """Wait until nothing runs, then check every law and every byte that readers can see."""
        engine = self.parts.service.engine
        async with asyncio.timeout(10):
            while engine.live or self.storage.open_reads:
                await asyncio.sleep(0.005)
        check_integrity(engine)
        assert engine.admission.promised == 0
        for pool in engine.pools.values():
            assert not any(slots.reserved + slots.filling for slots in pool.slots)
        self.sweep()

    def sweep(self) -> int:
        """Compare every resident page, seen as another process sees it, with what it must be."""
        swept = 0
        with PoolView(self.parts.pool.path) as view:
            for model, components in view.regions.items():
                for component in components:
                    for entry in view.slots(model, component):
                        if entry.state == "resident":
                            assert view.copy(model, component, entry.slot, entry.key) == content(entry.key, component)
                            swept += 1
        return swept


@asynccontextmanager
async def live(path: Path, *models: dict[str, Any], token: str = "", **settings: dict[str, Any]) -> AsyncIterator[Live]:
    """Run a service over a faulty storage in memory; `settings` are sections of the configuration."""
    raw: dict[str, Any] = {
        "pool": {"path": str(path / "pool"), "bytes": "64MiB", "pin": "none"},
        "models": list(models),
        **settings,
    }
    config = Config.model_validate(raw)
    memory = MemoryStorage()
    storage = FaultyStorage(memory)
    pool = await asyncio.to_thread(PoolFile.create, pool_settings(config), config.layouts())
    parts = assemble(config, pool, storage)
    context = Context(config, parts.service, pool, parts.storage.is_up, parts.metrics.exposition, __version__)
    app = create_app(context, token)
    server = uvicorn.Server(uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_config=None))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    started = asyncio.Event()
    running = asyncio.create_task(parts.service.run(started))
    await started.wait()
    serving = asyncio.create_task(server.serve([sock]))
    port = sock.getsockname()[1]
    try:
        async with AsyncClient(f"http://127.0.0.1:{port}", token=token or None) as client:
            async with asyncio.timeout(10):
                while not server.started:
                    await asyncio.sleep(0.001)
            yield Live(parts, storage, memory, port, client, context, app)
        storage.release()
    finally:
        storage.release()
        await parts.service.stop(5)
        server.should_exit = True
        await serving
        await running
        await parts.storage.aclose()
        check_integrity(parts.service.engine)
        pool.close()
