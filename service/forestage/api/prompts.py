"""Prompts on the wire: token ids, and what else enters their page keys, in place of the keys themselves."""

import sys
from array import array
from collections.abc import Sequence
from typing import Any

from fastapi import Request

from forestage.api.bodies import HashedBody, PrefixBody, check
from forestage.api.codec import MSGPACK
from forestage.api.context import Context
from forestage.api.keys import parse_keys
from forestage.core.errors import BadRequestError, TooLargeError
from forestage_client.hashing import HashScheme, LoraAdapter, MmItem, Prompt

__all__ = ["asked_keys", "scheme_of", "shown_keys", "take_keys"]

#: How often the items of a prompt may cover it, on average: they hardly overlap, and each costs time in every page.
MAX_COVER = 4
_WITH_TOKENS = tuple(HashedBody.model_fields)


async def take_keys(body: dict[str, Any], context: Context) -> tuple[bytes, ...]:
    """Take a prefix out of a body, and return its page keys: those it names, or those of its token ids.

    Raises BadRequestError (`no-hash-scheme` if the model has none), NotFoundError, TooLargeError and StoppingError.
    """
    max_pages = context.config.prefetch.max_pages
    if "token_ids" not in body:
        needless = [name for name in _WITH_TOKENS if name in body]
        if needless:
            raise BadRequestError(f"{needless[0]}: only with token_ids")
        return parse_keys(body.pop("keys", None), body.pop("key_bytes", None), max_pages)
    if "keys" in body or "key_bytes" in body:
        raise BadRequestError("token_ids: either these or keys")
    token_ids = body.pop("token_ids")
    scheme = scheme_of(body.get("model"), context)
    prompt = _prompt(token_ids, {name: body.pop(name) for name in _WITH_TOKENS if name in body})
    if scheme.num_pages(len(prompt.token_ids)) > max_pages:
        raise TooLargeError(f"token_ids: {scheme.num_pages(len(prompt.token_ids))} pages asked, at most {max_pages}")
    try:
        return await context.service.page_keys.of(scheme, prompt)
    except (TypeError, ValueError) as error:
        text = str(error) if isinstance(error, ValueError) else "token_ids: must be integers"
        raise BadRequestError(text) from None


def scheme_of(model: object, context: Context) -> HashScheme:
    """Return how the page keys of a model come from token ids. Raises BadRequestError and NotFoundError."""
    if not isinstance(model, str):
        raise BadRequestError("model: must be the name of a model")
    layout = context.service.engine.pool(model).layout
    scheme = context.hash_schemes.get(layout.name)
    if scheme is None:
        raise BadRequestError("the configuration names no hash for this model: send keys", slug="no-hash-scheme")
    return scheme


def shown_keys(keys: Sequence[bytes], accept: str) -> dict[str, object]:
    """Return the members of an answer that say page keys: hex in JSON, one `bin` in MessagePack."""
    if MSGPACK not in accept:
        return {"keys": [key.hex() for key in keys]}
    sizes = {len(key) for key in keys}
    if len(sizes) != 1:
        return {"keys": list(keys)}
    return {"keys": b"".join(keys), "key_bytes": sizes.pop()}


def asked_keys(request: Request, body: PrefixBody, keys: Sequence[bytes]) -> dict[str, object]:
    """Return the members of an answer that say page keys, if the request asks for them."""
    return shown_keys(keys, request.headers.get("accept", "")) if body.include_keys else {}


def _prompt(raw: object, hashed: dict[str, Any]) -> Prompt:
    token_ids = _token_ids(raw)
    body = check(HashedBody, hashed)
    lora = body.lora if body.lora is None or isinstance(body.lora, str) else LoraAdapter(body.lora.name, body.lora.path)
    items = [MmItem(item.identifier, item.offset, item.length) for item in body.mm]
    if any(item.end > len(token_ids) for item in items):
        raise BadRequestError("mm: an item goes beyond the token ids")
    if sum(item.length for item in items) > MAX_COVER * len(token_ids):
        raise BadRequestError(f"mm: the items cover the token ids more than {MAX_COVER} times")
    return Prompt(token_ids, body.extra_key, body.cache_salt, lora, items)


def _token_ids(raw: object) -> Sequence[int]:
    if isinstance(raw, list):
        return raw  # looked into where it is hashed, which for many is not here
    if not isinstance(raw, bytes):
        raise BadRequestError("token_ids: must be a list of token ids")
    if len(raw) % 4:
        raise BadRequestError(f"token_ids: {len(raw)} bytes are no whole number of ids of 4")
    words = array("I", raw)
    if sys.byteorder == "big":
        words.byteswap()
    return words
