"""L3 in Redis."""

from forestage.storage.redis.storage import RedisStorage, useful_connections

__all__ = ["RedisStorage", "useful_connections"]
