"""Prompts in requests to the fake service: their page keys take their place before anything else looks."""

from collections.abc import Mapping
from typing import Any, cast

from forestage_client._codec import decode_keys, decode_prompt
from forestage_client._errors import BadRequest, NotFound
from forestage_client._types import Model
from forestage_client.hashing import HashScheme, SchemeName

__all__ = ["FAKE_SEED", "show_keys", "take_prompt"]

#: The PYTHONHASHSEED that the fake takes vLLM to run with where the scheme needs one.
FAKE_SEED = "0"
_PROMPT = ("token_ids", "extra_key", "cache_salt", "lora", "mm")


def take_prompt(body: Mapping[str, Any], models: Mapping[str, Model]) -> tuple[dict[str, Any], list[bytes] | None]:
    """Return a body with keys in place of a prompt, and the keys that the answer is to say."""
    plain = {name: value for name, value in body.items() if name != "include_keys"}
    try:
        if "token_ids" in body:
            if "keys" in body or "key_bytes" in body:
                raise BadRequest("token_ids: either these or keys")
            keys = _scheme(body, models).keys_of_prompt(decode_prompt(body))
            plain = {name: value for name, value in plain.items() if name not in _PROMPT} | {"keys": keys}
        return plain, decode_keys(plain) if body.get("include_keys") else None
    except ValueError as error:
        raise BadRequest(str(error)) from error


def show_keys(body: Mapping[str, Any], models: Mapping[str, Model]) -> tuple[dict[str, object], list[bytes]]:
    """Answer `/v1/hash`: what to say, and the keys."""
    scheme = _scheme(body, models)
    keys: list[bytes] = take_prompt(body, models)[0].get("keys", [])
    facts = {"model": body["model"], "scheme": scheme.name, "page_tokens": scheme.page_tokens, "pages": len(keys)}
    return facts, keys


def _scheme(body: Mapping[str, Any], models: Mapping[str, Model]) -> HashScheme:
    model = models.get(body.get("model", ""))
    if model is None:
        raise NotFound(f"no model {body.get('model')!r}")
    if model.hash is None:
        raise BadRequest("no hash is configured for this model: send keys", slug="no-hash-scheme")
    seed = FAKE_SEED if model.hash == "vllm-xxhash-cbor" else None
    return HashScheme(cast("SchemeName", model.hash), model.page_tokens, seed)
