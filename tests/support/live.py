"""A service in this process, on a real socket, over a storage that the test holds in its hand."""

import asyncio
import hashlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from uvicorn.server import ServerState

from forestage import __version__
from forestage.api.app import create_app
from forestage.api.context import Context
from forestage.api.keyring import Keyring
from forestage.assembly import Assembly, assemble, pool_settings
from forestage.config import Config
from forestage.connections import Connection
from forestage.core.audit import check_integrity
from forestage.core.engine import Engine
from forestage.core.roles import Caller, Grant, Role
from forestage.pool.file import PoolFile
from forestage.sockets import bind_tcp, bind_unix
from forestage.storage.base import Storage
from forestage.storage.memory import MemoryStorage
from forestage.storage.wrap import FaultyStorage
from forestage_client import AsyncClient
from forestage_client.pool_view import PoolView

__all__ = ["PAGE_BYTES", "Live", "content", "hybrid", "kv_only", "live", "make_keys", "sum_of", "until"]

PAGE_BYTES = 4096


def make_keys(count: int, chain: str = "a") -> list[bytes]:
    """Page keys that are equal for equal chains."""
    return [hashlib.sha256(f"{chain}|{i}".encode()).digest() for i in range(count)]


def content(key: bytes, component: str, size: int = PAGE_BYTES) -> bytes:
    """Return the bytes of a page: any misplaced, stale or half-written one shows."""
    digest = hashlib.sha256(component.encode() + key).digest()
    return (digest * (size // len(digest) + 1))[:size]


def kv_only(slots: int, name: str = "m") -> dict[str, Any]:
    return {"name": name, "page_tokens": 16, "components": [{"name": "kv", "bytes": PAGE_BYTES, "slots": slots}]}


def hybrid(slots: int, states: int, window: int = 1) -> dict[str, Any]:
    model = kv_only(slots)
    tail = {"name": "state", "bytes": PAGE_BYTES, "slots": states, "covers": "tail", "window": window}
    return {**model, "components": [*model["components"], tail]}


async def until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    """Return as soon as `condition` holds; raises TimeoutError after `deadline_s` seconds."""
    async with asyncio.timeout(deadline_s):
        while True:
            if condition():
                return
            await asyncio.sleep(0.001)


def sum_of(samples: Mapping[str, float], name: str, *labels: str) -> float:
    """Add up the series of a metric that have all of these labels, written `label="value"`."""
    prefix = f"forestage_{name}"
    named = [s for s in samples if s.partition("{")[0] == prefix and all(label in s for label in labels)]
    assert named, f"no series {name} {labels}"
    return sum(samples[series] for series in named)


@dataclass
class Live:
    """What a test needs of the running service."""

    parts: Assembly
    storage: FaultyStorage
    memory: MemoryStorage
    port: int
    client: AsyncClient
    http: httpx2.AsyncClient
    context: Context
    app: Any
    running: asyncio.Task[None]
    connections: ServerState
    expected: Callable[[bytes, str], bytes] = content
    scraped: dict[str, float] = field(default_factory=dict)

    @property
    def engine(self) -> Engine:
        return self.parts.service.engine

    @property
    def asked(self) -> int:
        """Requests that have no answer yet."""
        return len(self.connections.tasks)

    @property
    def taken(self) -> int:
        """Slots that a job or a lease has, of all components; what is merely resident can be had."""
        pools = self.engine.pools.values()
        loading = sum(slots.reserved + slots.filling for pool in pools for slots in pool.slots)
        return loading + sum(index.held for pool in pools for index in pool.index)

    def store(self, keys: Sequence[bytes], states: Sequence[int] = (), model: str = "m") -> None:
        """Put pages into L3, and states at prefix lengths."""
        layout = self.engine.pools[model].layout
        for key in keys:
            self.memory.put(layout, 0, key, [content(key, "kv")])
        for length in states:
            self.memory.put(layout, 1, keys[length - 1], [content(keys[length - 1], "state")])

    async def quiet(self) -> dict[str, float]:
        """Wait until nothing runs, then check every law and every byte that readers can see; return the metrics."""
        await until(lambda: not self.engine.live and not self.storage.open_reads)
        # a read whose storage call has ended is taken in by a callback that may still be due
        await until(lambda: not any(s.reserved + s.filling for pool in self.engine.pools.values() for s in pool.slots))
        check_integrity(self.engine)
        assert self.engine.admission.promised == 0
        self.sweep()
        samples = await self.scrape()
        assert sum_of(samples, "jobs") == 0
        assert sum_of(samples, "inflight_bytes") == 0
        assert sum_of(samples, "pool_slots", 'state="loading"') == 0
        return samples

    async def idle(self) -> None:
        """Check that nothing at all is taken: no job, and after the leases are released, no slot."""
        await self.quiet()
        for lease in list(self.engine.leases):
            await self.client.release(lease.id)
        samples = await self.scrape()
        assert self.taken == 0
        assert sum_of(samples, "leases") == 0
        assert sum_of(samples, "pool_slots", 'state="leased"') == 0

    async def scrape(self) -> dict[str, float]:
        """Return every series of `/metrics`; they must conserve, and no counter may have fallen since the last call."""
        answer = await self.http.get("/metrics")
        assert answer.status_code == 200
        lines = [line.rpartition(" ") for line in answer.text.splitlines() if not line.startswith("#")]
        samples = {series: float(value) for series, _, value in lines}
        for model, pool in self.engine.pools.items():
            label = f'model="{model}"'
            ready, short = (sum_of(samples, name, label) for name in ("ready_pages_total", "shortfall_pages_total"))
            assert sum_of(samples, "requested_pages_total", label) == ready + short
            for component, slots in zip(pool.layout.components, pool.slots, strict=True):
                states = sum_of(samples, "pool_slots", label, f'component="{component.name}"')
                assert states == slots.capacity
        for series, value in self.scraped.items():
            if series.partition("{")[0].endswith(("_total", "_count", "_sum", "_bucket")):
                assert samples[series] >= value, series
        self.scraped = samples
        return samples

    def sweep(self) -> int:
        """Compare every resident page, seen as another process sees it, with what it must be."""
        swept = 0
        with PoolView(self.parts.pool.path) as view:
            for model, components in view.regions.items():
                for component in components:
                    for entry in view.slots(model, component):
                        if entry.state == "resident":
                            page = view.copy(model, component, entry.slot, entry.key)
                            assert page == self.expected(entry.key, component)
                            swept += 1
        return swept


def _transport() -> httpx2.AsyncHTTPTransport:
    # A bare TLS context: loading the machine's certificates takes longer than many a test.
    return httpx2.AsyncHTTPTransport(verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))


@asynccontextmanager
async def _serving(app: Any, sock: socket.socket) -> AsyncIterator[ServerState]:
    """Answer on a socket, with the connections that the service uses."""
    config = uvicorn.Config(app, http=Connection, ws="none", lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(config, state, {}), sock=sock)
    try:
        yield state
    finally:
        server.close()
        for connection in list(state.connections):
            connection.shutdown()
        await until(lambda: not state.tasks)


@asynccontextmanager
async def live(
    path: Path,
    *models: dict[str, Any],
    token: str = "",
    tenant_tokens: Mapping[str, str] | None = None,
    grants: Sequence[Grant] = (),
    inner: Storage | None = None,
    expected: Callable[[bytes, str], bytes] = content,
    **settings: Any,
) -> AsyncIterator[Live]:
    """Run a service over a faulty storage in memory (or `inner`); `settings` are sections of the configuration.

    `token`, `tenant_tokens` by tenant, and `grants` are taken; without any, everybody may call.
    """
    raw: dict[str, Any] = {
        "pool": {"path": str(path / "pool"), "bytes": "64MiB", "pin": "none"},
        "models": list(models),
        **settings,
    }
    config = Config.model_validate(raw)
    memory = MemoryStorage()
    storage = FaultyStorage(inner or memory)
    pool = await asyncio.to_thread(PoolFile.create, pool_settings(config), config.layouts())
    parts = assemble(config, pool, storage)
    context = Context(
        config, parts.service, pool, parts.storage.is_up, parts.metrics.exposition, __version__, parts.history
    )
    own = [Grant(secret, Caller(Role.ADMIN, tenant)) for tenant, secret in (tenant_tokens or {}).items()]
    app = create_app(context, Keyring([*([Grant(token)] if token else []), *own, *grants]))
    sock = bind_tcp("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if parts.publisher is not None:
        parts.publisher.open()
    started = asyncio.Event()
    regions = bind_unix(config.server.regions_uds) if config.server.regions_uds else None
    if regions is not None:
        parts.service.regions.listen_on(regions)
    running = asyncio.create_task(parts.service.run(started))
    await started.wait()
    try:
        async with (
            _serving(app, sock) as connections,
            AsyncClient(url, token=token or None, timeout_s=30) as client,
            httpx2.AsyncClient(base_url=url, headers=headers, timeout=30, transport=_transport()) as http,
        ):
            port = sock.getsockname()[1]
            yield Live(parts, storage, memory, port, client, http, context, app, running, connections, expected)
            storage.release()
            await parts.service.stop(5)  # so that no handler waits for a job any more
    finally:
        storage.release()
        await parts.service.stop(5)
        await asyncio.wait([running])
        await parts.storage.aclose()
        check_integrity(parts.service.engine)
        pool.close()
        if regions is not None:
            regions.close()
    if not running.cancelled():
        running.result()
