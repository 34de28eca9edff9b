"""Reads the bodies that name a prefix: its keys apart from the rest, thousands at a time."""

from typing import Any

from fastapi import Request

from forestage.api.codec import read_body
from forestage.api.context import Context
from forestage.api.keys import parse_keys
from forestage.api.prompts import take_keys
from forestage.config import Config

__all__ = ["BODY_PROBLEMS", "KEYS_PROBLEMS", "PREFIX_PROBLEMS", "read_keys", "read_prefix"]

#: Of every route that takes a body, of those that name keys, and of those that take token ids in place of keys.
BODY_PROBLEMS = ("unparsable", "too-large", "unsupported-media-type", "invalid-request")
KEYS_PROBLEMS = (*BODY_PROBLEMS, "other-tenant", "unknown-model", "duplicate-key", "stopping")
PREFIX_PROBLEMS = (*KEYS_PROBLEMS, "no-hash-scheme")


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
