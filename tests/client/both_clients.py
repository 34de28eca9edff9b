"""One test body for both clients: the asyncio one is driven, call by call, on a loop of its own."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal, cast

from forestage_client import AsyncClient, Client, Encoding
from forestage_client.testing import FakeForestage

__all__ = ["Clients", "Kind"]

Kind = Literal["sync", "async"]


class _Driven:
    """An AsyncClient whose methods block."""

    def __init__(self, client: AsyncClient, runner: asyncio.Runner) -> None:
        self._client = client
        self._runner = runner

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            async def awaited() -> Any:
                return await method(*args, **kwargs)

            return self._runner.run(awaited())

        return call

    def __repr__(self) -> str:
        return repr(self._client)

    def close(self) -> None:
        self._runner.run(self._client.aclose())


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
