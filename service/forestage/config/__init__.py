"""The configuration: TOML and environment in, a frozen and consistent Config out."""

from forestage.config.access import read_grants, read_token
from forestage.config.hashing import HashConfig
from forestage.config.load import load
from forestage.config.mistakes import ConfigError
from forestage.config.models import ComponentConfig, HicacheConfig, LmcacheConfig, ModelConfig, VllmConfig
from forestage.config.relations import expected_shards
from forestage.config.render import render
from forestage.config.schema import (
    Config,
    EventsConfig,
    FileConfig,
    HicacheFileConfig,
    LeaseConfig,
    LmcacheFileConfig,
    LmcacheRedisConfig,
    PoolConfig,
    PrefetchConfig,
    RedisConfig,
    ServerConfig,
    StorageConfig,
    VllmFileConfig,
    WritesConfig,
)
from forestage.config.tenants import TenantConfig
from forestage.config.tokens import TokenConfig

__all__ = [
    "ComponentConfig",
    "Config",
    "ConfigError",
    "EventsConfig",
    "FileConfig",
    "HashConfig",
    "HicacheConfig",
    "HicacheFileConfig",
    "LeaseConfig",
    "LmcacheConfig",
    "LmcacheFileConfig",
    "LmcacheRedisConfig",
    "ModelConfig",
    "PoolConfig",
    "PrefetchConfig",
    "RedisConfig",
    "ServerConfig",
    "StorageConfig",
    "TenantConfig",
    "TokenConfig",
    "VllmConfig",
    "VllmFileConfig",
    "WritesConfig",
    "expected_shards",
    "load",
    "read_grants",
    "read_token",
    "render",
]
