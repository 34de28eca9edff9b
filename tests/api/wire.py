"""Requests and answers in both encodings, without the client library between."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx2
import msgpack

from support.live import Live

__all__ = ["Answer", "Wire"]

MEDIA = {"json": "application/json", "msgpack": "application/msgpack"}


@dataclass(frozen=True)
class Answer:
    """One answer, decoded."""

    status: int
    body: Any
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Wire:
    """Sends and takes one of the encodings."""

    service: Live
    encoding: Literal["json", "msgpack"]

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        media = MEDIA[self.encoding]
        request: dict[str, Any] = {"headers": {"Accept": media}}
        if body is not None:
            request["headers"]["Content-Type"] = media
            if self.encoding == "json":
                request["json"] = body
            else:
                request["content"] = msgpack.packb(body)
        return _read(await self.service.http.request(method, path, **request))

    async def prefetch(self, keys: Sequence[bytes], **fields: Any) -> Answer:
        return await self.ask("POST", "/v1/prefetch", {"model": "m", "keys": self.keys(keys), **fields})

    def keys(self, keys: Sequence[bytes]) -> list[Any]:
        """Keys as this encoding has them."""
        return [key.hex() for key in keys] if self.encoding == "json" else list(keys)


def _read(answer: httpx2.Response) -> Answer:
    media = answer.headers.get("content-type", "")
    if not answer.content:
        body = None
    elif media == MEDIA["msgpack"]:
        body = msgpack.unpackb(answer.content)
    else:
        assert media in (MEDIA["json"], "application/problem+json"), media
        body = answer.json()
    return Answer(answer.status_code, body, answer.headers)
