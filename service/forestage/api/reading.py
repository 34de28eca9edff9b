"""Reads the bodies that name a prefix: its keys apart from the rest, thousands at a time."""

from typing import Any

from fastapi import Request

from forestage.api.codec import read_body
from forestage.api.context import Context
from forestage.api.keys import parse_keys
from forestage.api.prompts import take_keys
from forestage.config import Config

__all__ = ["BODY_PROBLEMS", "read_keys", "read_prefix"]

BODY_PROBLEMS = (400, 403, 404, 413, 415, 422)


async def read_keys(request: Request, config: Config) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """Return a body without its keys, and the keys. Raises BadRequestError and TooLargeError."""
    body = await read_body(request, config.server.max_body_bytes)
    keys = parse_keys(body.pop("keys", None), body.pop("key_bytes", None), config.prefetch.max_pages)
    return body, keys


async def read_prefix(request: Request, context: Context) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """Return a body without its prefix, and the page keys of that, whether it has them or token ids.

    Raises what `read_keys` and `prompts.take_keys` do.
    """
    body = await read_body(request, context.config.server.max_body_bytes)
    return body, await take_keys(body, context)
