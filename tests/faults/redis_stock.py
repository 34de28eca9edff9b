"""Chains of stored pages for the tests of faults, and what all of these look at."""

from collections.abc import Sequence

from forestage.core.layout import ModelLayout
from support.live import make_keys
from support.live_redis import LiveRedis, put
from support.redis_servers import RedisServer

__all__ = ["PAGES", "Chains", "Stock", "assert_degraded", "assert_up"]

PAGES = 8


class Chains:
    """Hands out chains of `PAGES` page keys, each once; the spare one is for asking again and again."""

    def __init__(self, chains: int = 6) -> None:
        self._left = [make_keys(PAGES, f"chain {number}") for number in range(chains)]
        self.keys = [key for chain in self._left for key in chain]
        self._spare = self._left.pop()

    def __call__(self) -> Sequence[bytes]:
        return self._left.pop()

    def spare(self) -> Sequence[bytes]:
        """Return the chain that is not handed out otherwise."""
        return self._spare


class Stock(Chains):
    """Chains of pages that lie in a server."""

    def __init__(self, server: RedisServer, model: ModelLayout) -> None:
        """Store them."""
        super().__init__()
        self._server = server
        self._model = model
        self.store()

    def store(self) -> None:
        """Store all of them anew."""
        put(self._server, self._model, self.keys)


async def assert_up(live: LiveRedis) -> None:
    """Check that everything that tells of the storage says that it is well."""
    ready = await live.client.ready()
    assert (bool(ready), ready.storage) == (True, "up")
    assert await live.metric("storage_up") == 1


async def assert_degraded(live: LiveRedis) -> None:
    """Check that the service takes work and says that its storage is away."""
    ready = await live.client.ready()
    assert (bool(ready), ready.storage) == (True, "degraded")
    assert await live.metric("storage_up") == 0
