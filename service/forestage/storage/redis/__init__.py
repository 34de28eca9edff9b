"""L3 in Redis."""

from forestage.storage.redis.storage import RedisStorage

__all__ = ["RedisStorage"]
