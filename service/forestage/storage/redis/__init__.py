"""L3 in Redis."""

from forestage.storage.redis.storage import LmcacheRedisStorage, RedisStorage, useful_connections

__all__ = ["LmcacheRedisStorage", "RedisStorage", "useful_connections"]
