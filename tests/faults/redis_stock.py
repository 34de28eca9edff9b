"""Chains of stored pages for the tests of faults, and what they look at again and again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from forestage.core.layout import ModelLayout
from support.live import make_keys
from support.live_redis import LiveRedis, name_of, put, value_of
from support.redis_servers import RedisServer
from support.redis_stub import RedisStub

__all__ = ["PAGES", "Stock", "assert_degraded", "assert_up", "stub_with"]

PAGES = 8


class Stock:
    """Hands out chains of `PAGES` stored pages that nobody has asked for yet."""

    def __init__(self, server: RedisServer, model: ModelLayout, chains: int = 24) -> None:
        """Store them."""
        self._server = server
        self._model = model
        self._chains = [make_keys(PAGES, f"chain {number}") for number in range(chains)]
        self._next = 0
        self.store()

    def store(self) -> None:
        """Store all of them anew."""
        put(self._server, self._model, [key for chain in self._chains for key in chain])

    def __call__(self) -> Sequence[bytes]:
        self._next += 1
        return self._chains[self._next - 1]


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


@contextmanager
def stub_with(keys: Sequence[bytes], model: ModelLayout) -> Iterator[RedisStub]:
    """Run a scripted server that has pages."""
    with RedisStub() as stub:
        stub.values.update({name_of(model, key): value_of(model, key) for key in keys})
        yield stub
