"""A service in this process over Redis as it is configured, watched while the Redis is ill-treated."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from forestage import __version__
from forestage.api.app import create_app
from forestage.api.context import Context
from forestage.api.keyring import Keyring
from forestage.assembly import Assembly, assemble, build_storage, pool_settings
from forestage.config import Config
from forestage.core.audit import check_integrity
from forestage.core.layout import ModelLayout
from forestage.pool.file import PoolFile
from forestage.sockets import bind_tcp
from forestage.storage.envelope import seal, seed_of
from forestage.storage.redis import RedisStorage
from forestage_client import AsyncClient, Prefetch
from forestage_client.pool_view import PoolView
from support.redis_servers import ClusterGroup, RedisServer

__all__ = [
    "PAGE_BYTES",
    "Answer",
    "LiveRedis",
    "live_redis",
    "name_of",
    "page_of",
    "put",
    "put_in_cluster",
    "until",
    "value_of",
]

PAGE_BYTES = 64 << 10


def page_of(key: bytes, component: str = "kv", size: int = PAGE_BYTES) -> bytes:
    """Return the payload of a page: any misplaced, stale or half-written one shows."""
    block = component.encode().ljust(32, b".") + key
    return (block * (size // len(block) + 1))[:size]


def name_of(model: ModelLayout, key: bytes, component: str = "kv") -> bytes:
    """Return the Redis key of a page."""
    return f"forestage:{model.fingerprint}:{component}:0:".encode() + key


def value_of(model: ModelLayout, key: bytes, component: str = "kv") -> bytes:
    """Return the value of a page as it must be stored."""
    size = next(c.bytes for c in model.components if c.name == component)
    payload = page_of(key, component, size)
    return payload + seal(payload, key, seed_of(model.fingerprint, component, 0))


def put(server: RedisServer, model: ModelLayout, keys: Sequence[bytes], component: str = "kv") -> None:
    """Put pages into a server, past the service and any proxy."""
    with server.admin() as client:
        client.mset({name_of(model, key, component): value_of(model, key, component) for key in keys})


def put_in_cluster(group: ClusterGroup, model: ModelLayout, keys: Sequence[bytes]) -> None:
    """Put pages where they belong in a cluster."""
    for number, node in enumerate(group.nodes):
        mine = [key for key in keys if group.owner(name_of(model, key)) == number]
        if mine:
            with node.admin() as client, client.pipeline(transaction=False) as pipe:
                for key in mine:
                    pipe.set(name_of(model, key), value_of(model, key))
                pipe.execute()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a prefetch got, and how many milliseconds that took."""

    job: Prefetch
    ms: float

    @property
    def ready(self) -> int:
        return self.job.pages.ready

    @property
    def shortfall(self) -> dict[str, int]:
        return dict(self.job.shortfall)


@dataclass
class LiveRedis:
    """The running service. `health_ms` are the times that `/healthz` took, asked every few milliseconds all along."""

    parts: Assembly
    client: AsyncClient
    storage: RedisStorage
    health_ms: list[float] = field(default_factory=list)

    @property
    def model(self) -> ModelLayout:
        return self.parts.config.layouts()[0]

    @property
    def is_up(self) -> bool:
        return self.parts.storage.is_up()

    async def ask(self, keys: Sequence[bytes], *, wait_ms: int = 20_000, **options: Any) -> Answer:
        """Prefetch and wait for the end."""
        began = time.monotonic()
        job = await self.client.prefetch("m", keys, wait_ms=wait_ms, **options)
        spent = (time.monotonic() - began) * 1e3
        assert job.done
        assert job.pages.requested - job.pages.ready == sum(job.shortfall.values())
        self.check_pages(keys, job)
        return Answer(job, spent)

    def check_pages(self, keys: Sequence[bytes], job: Prefetch) -> None:
        """Compare every page that was handed out with what it must be, as another process sees it."""
        if not job.slots:
            return
        with PoolView(self.parts.pool.path) as view:
            for key, slot in zip(keys, job.slots["kv"], strict=False):
                size = self.model.components[0].bytes
                assert view.copy("m", "kv", slot, key) == page_of(key, size=size)

    async def drop(self, job: Prefetch) -> None:
        """Release a job's lease and forget it."""
        await self.client.cancel(job.request_id)

    async def heals(self, keys: Callable[[], Sequence[bytes]], deadline_s: float = 8.0) -> float:
        """Ask for new keys again and again until all are there; return how many milliseconds that took."""
        began = time.monotonic()
        while True:
            wanted = keys()
            answer = await self.ask(wanted)
            await self.drop(answer.job)
            if answer.ready == len(wanted):
                return (time.monotonic() - began) * 1e3
            assert time.monotonic() - began < deadline_s, answer
            await asyncio.sleep(0.02)

    async def metric(self, name: str, *labels: str) -> float:
        """Return the sum of a metric's series that have all these labels."""
        lines = [line.rpartition(" ") for line in (await self.client.metrics()).splitlines() if line[:1] != "#"]
        return sum(
            float(value)
            for series, _, value in lines
            if series.partition("{")[0] == f"forestage_{name}" and all(label in series for label in labels)
        )

    async def quiet(self) -> None:
        """Wait until nothing runs; then check every law, every gauge and every resident byte."""
        engine = self.parts.service.engine
        pools = engine.pools.values()
        await until(lambda: not engine.live and not any(s.reserved + s.filling for pool in pools for s in pool.slots))
        check_integrity(engine)
        self.storage.check_integrity()
        assert engine.admission.promised == 0
        with PoolView(self.parts.pool.path) as view:
            for entry in view.slots("m", "kv"):
                if entry.state == "resident":
                    size = self.model.components[0].bytes
                    assert view.copy("m", "kv", entry.slot, entry.key) == page_of(entry.key, size=size)
        # Errors are counted when the storage's call returns, which may be after the job's end.
        await until(lambda: not self.parts.service._reads.in_flight)
        assert await self.metric("jobs") == 0
        assert await self.metric("inflight_bytes") == 0
        assert await self.metric("pool_slots", 'state="loading"') == 0


def config_of(path: Path, url: str, slots: int, page_bytes: int, sections: dict[str, dict[str, Any]]) -> Config:
    """Return a configuration over a Redis, patient with probes (a busy machine may be slow) and less so with reads."""
    storage: dict[str, Any] = {
        "kind": "redis",
        "probe_timeout_ms": 2000,
        "stall_timeout_ms": 600,
        **sections.get("storage", {}),
    }
    storage["redis"] = {"url": url, **storage.get("redis", {})}
    components = [{"name": "kv", "bytes": page_bytes, "slots": slots}]
    raw: dict[str, Any] = {
        "pool": {"path": str(path / "pool"), "bytes": "256MiB", "pin": "none"},
        "models": [{"name": "m", "page_tokens": 16, "components": components}],
        **sections,
        "storage": storage,
    }
    return Config.model_validate(raw)


@asynccontextmanager
async def live_redis(
    path: Path, url: str, *, slots: int = 64, page_bytes: int = PAGE_BYTES, **sections: dict[str, Any]
) -> AsyncIterator[LiveRedis]:
    """Run a service over the Redis at `url`; `sections` are those of the configuration."""
    config = config_of(path, url, slots, page_bytes, sections)
    storage = build_storage(config)
    assert isinstance(storage, RedisStorage)
    pool = await asyncio.to_thread(PoolFile.create, pool_settings(config), config.layouts())
    parts = assemble(config, pool, storage)
    context = Context(
        config, parts.service, pool, parts.storage.is_up, parts.metrics.exposition, __version__, parts.history
    )
    settings = uvicorn.Config(
        create_app(context, Keyring()), http="httptools", ws="none", lifespan="off", log_config=None
    )
    server = uvicorn.Server(settings)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    await parts.storage.open()
    started = asyncio.Event()
    running = asyncio.create_task(parts.service.run(started))
    await started.wait()
    stack = contextlib.ExitStack()
    sock = stack.enter_context(bind_tcp("127.0.0.1", 0))
    port = sock.getsockname()[1]
    serving = asyncio.create_task(server.serve([sock]))
    watching: asyncio.Task[None] | None = None
    try:
        async with AsyncClient(f"http://127.0.0.1:{port}", timeout_s=30) as client:
            await until(client.healthy)
            live = LiveRedis(parts, client, storage)
            watching = asyncio.create_task(_watch(port, live.health_ms))
            yield live
            await _ended(watching)
            watching = None
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.wait([watching])
        await parts.service.stop(5)
        server.should_exit = True
        await serving
        stack.close()
        await running
        await parts.storage.aclose()
        check_integrity(parts.service.engine)
        pool.close()


async def _ended(task: asyncio.Task[None]) -> None:
    """End a task; raise what it raised by itself."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _watch(port: int, spans: list[float]) -> None:
    """Ask `/healthz` over one connection until cancelled."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while True:
            began = time.monotonic()
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: t\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            spans.append((time.monotonic() - began) * 1e3)
            await asyncio.sleep(0.005)
    finally:
        writer.close()


async def until(
    condition: Callable[[], bool | Awaitable[bool]], deadline_s: float = 10.0, every_s: float = 0.005
) -> None:
    """Return as soon as `condition` holds. Raises TimeoutError after `deadline_s` seconds."""
    async with asyncio.timeout(deadline_s):
        while True:
            held = condition()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(every_s)
