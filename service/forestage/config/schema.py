"""The settings of the service: every key with its default and its limits.

Times are milliseconds, sizes bytes, fractions parts of 1; 0 means what the comment beside it says.
"""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from forestage.config.models import ModelConfig
from forestage.config.quantities import Bytes, Mode
from forestage.config.redis_url import RedisUrl
from forestage.config.section import MAX_RANKS, AtLeastOne, Count, Milliseconds, Section, Timeout
from forestage.config.tenants import TenantConfig
from forestage.config.tokens import TokenConfig
from forestage.config.words import Endpoint, Host, Path, Prefix, ReplayEndpoint, SocketPath, Text, Topic
from forestage.core.layout import ModelLayout
from forestage.core.tenants import TenantShare

__all__ = [
    "Config",
    "EventsConfig",
    "FileConfig",
    "HicacheFileConfig",
    "LeaseConfig",
    "LmcacheFileConfig",
    "LmcacheRedisConfig",
    "PoolConfig",
    "PrefetchConfig",
    "RedisConfig",
    "ServerConfig",
    "StorageConfig",
    "VllmFileConfig",
    "WritesConfig",
]


class ServerConfig(Section):
    """Where the API listens, and who may call it."""

    host: Host = "127.0.0.1"
    port: int = Field(default=8470, ge=0, le=65535)  # 0: the system picks one
    uds: SocketPath = ""  # empty: TCP only
    regions_uds: SocketPath = ""  # empty: no memory of other processes is filled
    token_file: Text = ""  # empty: anybody who reaches the port may call
    max_body_bytes: Bytes = 8 << 20
    max_connections: int = Field(default=1024, ge=1, le=65535)
    max_tenant_requests: int = Field(default=512, ge=1, le=65535)  # at once, by tokens of one tenant
    request_timeout_ms: Timeout = 30_000
    page: bool = True

    @field_validator("regions_uds")
    @classmethod
    def _apart_from_the_api(cls, value: str, info: ValidationInfo) -> str:
        if value and value == info.data.get("uds"):
            raise ValueError("must be another path than server.uds")
        return value


class PoolConfig(Section):
    """The shared-memory pool file."""

    path: Path = "/dev/shm/forestage/pool"
    bytes: Bytes = 1 << 30
    pin: Literal["auto", "cuda", "mlock", "none"] = "auto"
    hugepages: Literal["auto", "on", "off"] = "auto"
    numa_node: int = Field(default=-1, ge=-1, le=1023)  # -1: any
    mode: Mode = 0o660
    write_reserve: float = Field(default=0.0, ge=0, lt=1)


class FileConfig(Section):
    """The directory of the storage kind `file`."""

    root: Path = "./l3"
    direct: bool = False


class HicacheFileConfig(Section):
    """The directory of the storage kind `hicache-file`."""

    root: Path = "./hicache"


class VllmFileConfig(Section):
    """The directory of the storage kind `vllm-file`."""

    root: Path = "./vllm-kv"


class LmcacheFileConfig(Section):
    """The directory of the storage kind `lmcache-file`."""

    root: Path = "./lmcache"


class RedisConfig(Section):
    """The server of the storage kind `redis`. `url` may hold a password, so it stays out of `repr`."""

    url: RedisUrl = Field(default="redis://127.0.0.1:6379/0", repr=False)
    prefix: Prefix = "forestage"
    connections: int = Field(default=4, ge=1, le=1024)  # that read, by server
    ttl_s: Count = 0  # 0: values stay


class LmcacheRedisConfig(Section):
    """The server of the storage kind `lmcache-redis`. `url` may hold a password, so it stays out of `repr`."""

    url: RedisUrl = Field(default="redis://127.0.0.1:6379/0", repr=False)
    connections: int = Field(default=4, ge=1, le=1024)  # that read, by server
    ttl_s: Count = 0  # 0: values stay


class StorageConfig(Section):
    """Which L3 is used, and how patiently."""

    kind: Literal["file", "hicache-file", "vllm-file", "lmcache-file", "lmcache-redis", "redis"] = "file"
    readers: int = Field(default=0, ge=0, le=1024)  # 0: chosen for this machine
    probe_timeout_ms: Timeout = 1000
    stall_timeout_ms: Timeout = 2000
    file: FileConfig = FileConfig()
    hicache_file: HicacheFileConfig = Field(default=HicacheFileConfig(), alias="hicache-file")
    vllm_file: VllmFileConfig = Field(default=VllmFileConfig(), alias="vllm-file")
    lmcache_file: LmcacheFileConfig = Field(default=LmcacheFileConfig(), alias="lmcache-file")
    lmcache_redis: LmcacheRedisConfig = Field(default=LmcacheRedisConfig(), alias="lmcache-redis")
    redis: RedisConfig = RedisConfig()


class PrefetchConfig(Section):
    """Admission, and the life of jobs."""

    max_pages: int = Field(default=65536, ge=1, le=2**31 - 1)
    min_pages: Count = Field(default=1, validate_default=True)
    max_inflight_fraction: float = Field(default=0.8, gt=0, le=1)
    queue_limit: Count = 1024
    max_jobs: int = Field(default=65536, ge=1, le=2**24)
    deadline_ms: Milliseconds = 0  # 0: none
    settle_ms: Milliseconds = 20
    keep_done_ms: Milliseconds = 60_000

    @field_validator("min_pages")
    @classmethod
    def _within_a_request(cls, value: int, info: ValidationInfo) -> int:
        if value > info.data.get("max_pages", value):
            raise ValueError(f"must be at most prefetch.max_pages ({info.data['max_pages']}), or nothing is ever read")
        return value


class LeaseConfig(Section):
    """How long, and how much of the pool, slots are promised."""

    max_ms: Milliseconds = 600_000
    default_ms: Milliseconds = Field(default=30_000, validate_default=True)
    max_pin_ms: Timeout = 3_600_000
    max_leases: int = Field(default=262_144, ge=1, le=2**24)
    max_pins: int = Field(default=65536, ge=1, le=2**24)
    max_pinned_fraction: float = Field(default=1.0, gt=0, le=1)

    @field_validator("default_ms")
    @classmethod
    def _within_the_longest(cls, value: int, info: ValidationInfo) -> int:
        if value > info.data.get("max_ms", value):
            raise ValueError(f"must be at most lease.max_ms ({info.data['max_ms']})")
        return value


class WritesConfig(Section):
    """Pages that engines put into the pool, and their way to L3."""

    expire_ms: Timeout = 30_000
    max_dirty_fraction: float = Field(default=0.5, gt=0, le=1)
    max_attempts: int = Field(default=5, ge=1, le=1000)
    max_writes: int = Field(default=65536, ge=1, le=2**24)
    keep_done_ms: Milliseconds = 60_000


class EventsConfig(Section):
    """Who may follow what comes into the pool and leaves it, and whether it is published as KV events."""

    buffer: int = Field(default=65536, ge=1, le=2**24)  # events; nothing is kept while nobody listens
    max_listeners: int = Field(default=16, ge=0, le=1024)
    publish: bool = False
    endpoint: Endpoint = "tcp://127.0.0.1:5557"
    replay_endpoint: ReplayEndpoint = "tcp://127.0.0.1:5558"  # empty: no replays
    form: Literal["array", "map"] = "array"
    hashes: Literal["auto", "bytes", "vllm", "sglang"] = "auto"
    topic: Topic = ""
    buffer_steps: int = Field(default=10_000, ge=1, le=2**20)  # batches
    data_parallel_rank: int = Field(default=0, ge=0, le=MAX_RANKS)
    clear: bool = True


class Config(Section):
    """All settings of one service."""

    server: ServerConfig = ServerConfig()
    pool: PoolConfig = PoolConfig()
    storage: StorageConfig = StorageConfig()
    prefetch: PrefetchConfig = PrefetchConfig()
    lease: LeaseConfig = LeaseConfig()
    writes: WritesConfig = WritesConfig()
    events: EventsConfig = EventsConfig()
    tokens: Annotated[tuple[TokenConfig, ...], Field(strict=False)] = ()
    tenants: Annotated[tuple[TenantConfig, ...], Field(strict=False)] = ()
    models: Annotated[tuple[ModelConfig, ...], Field(strict=False), AtLeastOne]

    def shares(self) -> tuple[TenantShare, ...]:
        """Return the configured tenants as the core knows them."""
        return tuple(tenant.share() for tenant in self.tenants)

    def layouts(self) -> tuple[ModelLayout, ...]:
        """Return what a page of each model consists of, in configured order."""
        return tuple(model.model_layout() for model in self.models)
