"""Bodies in and out: JSON or MessagePack, counted while they are read."""

from collections.abc import Mapping
from typing import Any

import msgpack
from fastapi import Request, Response
from pydantic_core import from_json, to_json
from starlette.requests import ClientDisconnect

from forestage.core.errors import BadRequestError, ForestageError, TooLargeError

__all__ = ["JSON", "MSGPACK", "UnparsableError", "UnsupportedMediaError", "answer", "read_body"]

JSON = "application/json"
MSGPACK = "application/msgpack"


class UnparsableError(ForestageError):
    """The body is not what its Content-Type says."""

    status = 400
    slug = "unparsable"


class UnsupportedMediaError(ForestageError):
    """The body is neither JSON nor MessagePack."""

    status = 415
    slug = "unsupported-media-type"


async def read_body(request: Request, max_bytes: int) -> dict[str, Any]:
    """Read and parse a request body: an object with text keys.

    Raises TooLargeError as soon as more than `max_bytes` have come, UnparsableError, UnsupportedMediaError, and
    BadRequestError when it is not an object.
    """
    media = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if media not in (JSON, MSGPACK):
        raise UnsupportedMediaError(f"the body must be {JSON} or {MSGPACK}")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise TooLargeError(f"the body may have {max_bytes} bytes")
    body = await _read_counted(request, max_bytes)
    try:
        parsed = from_json(body, allow_inf_nan=False) if media == JSON else _unpack(body)
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.UnpackException) as error:
        # What the parsers say may quote the body, so it is not passed on.
        raise UnparsableError(f"the body is not valid {media}") from error
    if not isinstance(parsed, dict) or not all(isinstance(key, str) for key in parsed):
        raise BadRequestError("the body must be an object")
    return parsed


async def _read_counted(request: Request, max_bytes: int) -> bytes:
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise TooLargeError(f"the body may have {max_bytes} bytes")
            chunks.append(chunk)
    except ClientDisconnect:
        # Nobody will see this answer; it only is no failure of ours.
        raise UnparsableError("the client left before its body was whole") from None
    return b"".join(chunks)


def _unpack(body: bytes) -> Any:
    return msgpack.unpackb(body, raw=False, strict_map_key=True, max_ext_len=0)


def answer(request: Request, content: Mapping[str, object], status: int = 200) -> Response:
    """Encode an answer as the caller accepts it: MessagePack when asked for, else JSON."""
    if MSGPACK in request.headers.get("accept", ""):
        return Response(msgpack.packb(content), status, media_type=MSGPACK)
    return Response(to_json(content), status, media_type=JSON)
