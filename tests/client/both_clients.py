"""One test body for both clients: the asyncio one is driven, call by call, on a loop of its own."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack
from typing import Any, Literal, Self, cast

from forestage_client import AsyncClient, Client, Encoding, PoolEvent
from forestage_client.testing import FakeForestage

__all__ = ["Clients", "Kind"]

Kind = Literal["sync", "async"]


class _Driven:
    """An AsyncClient whose methods block."""

    def __init__(self, client: AsyncClient, runner: asyncio.Runner) -> None:
        self._client = client
        self._runner = runner
        self._followed: list[_Followed] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            async def awaited() -> Any:
                return await method(*args, **kwargs)

            return self._runner.run(awaited())

        return call

    def events(self, *args: Any, **kwargs: Any) -> "_Followed":
        """Iterate over what the client iterates over."""
        followed = _Followed(self._client.events(*args, **kwargs), self._runner)
        self._followed.append(followed)
        return followed

    def __repr__(self) -> str:
        return repr(self._client)

    def close(self) -> None:
        for followed in self._followed:
            followed.close()
        self._runner.run(self._client.aclose())


class _Followed:
    """An asynchronous stream of events whose steps block."""

    def __init__(self, stream: AsyncGenerator[PoolEvent, None], runner: asyncio.Runner) -> None:
        self._stream = stream
        self._runner = runner

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PoolEvent:
        async def following() -> PoolEvent:
            return await anext(self._stream)

        return self._runner.run(following())

    def close(self) -> None:
        self._runner.run(self._stream.aclose())


class Clients:
    """Makes clients of one kind and closes them with `stack`."""

    def __init__(self, kind: Kind, stack: ExitStack) -> None:
        self.kind = kind
        self._stack = stack

    def connect(
        self, url: str, *, token: str | None = None, timeout_s: float = 5.0, encoding: Encoding = "msgpack"
    ) -> Client:
        """Make a client as users do."""
        if self.kind == "sync":
            return self._closing(Client(url, token=token, timeout_s=timeout_s, encoding=encoding))
        return self._closing(AsyncClient(url, token=token, timeout_s=timeout_s, encoding=encoding))

    def of(self, fake: FakeForestage, *, encoding: Encoding = "msgpack", token: str | None = None) -> Client:
        """Make a client of a fake service."""
        if self.kind == "sync":
            return self._closing(fake.client(encoding=encoding, token=token))
        return self._closing(fake.aclient(encoding=encoding, token=token))

    def _closing(self, client: Client | AsyncClient) -> Client:
        if isinstance(client, AsyncClient):
            runner = self._stack.enter_context(asyncio.Runner())
            client = cast("Client", _Driven(client, runner))
        self._stack.callback(client.close)
        return client
