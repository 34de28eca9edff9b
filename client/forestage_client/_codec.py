"""Bodies on the wire: JSON or MessagePack, page keys as hex or bin, slot lists as integers or one bin.

Law: `decode_keys(decode_body(encode_body(body, keys, encoding)))` gives the same keys in the same order, as bytes.
"""

import json
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgpack

from forestage_client._errors import BadRequest
from forestage_client.hashing.prompt import LoraAdapter, MmItem, Prompt

__all__ = [
    "JSON_TYPE",
    "MEDIA_TYPES",
    "MSGPACK_TYPE",
    "Encoding",
    "Key",
    "Keys",
    "decode_body",
    "decode_keys",
    "decode_prompt",
    "decode_slots",
    "encode_body",
    "encode_fields",
    "encode_slots",
]

Encoding = Literal["msgpack", "json"]
Key = str | bytes
"""A page key: 16 to 64 bytes, or the same as hex."""

Keys = Sequence[Key] | Prompt
"""The page keys of a prefix in order, or the prompt that they are derived from."""

JSON_TYPE = "application/json"
MSGPACK_TYPE = "application/msgpack"
MEDIA_TYPES: Mapping[str, str] = {"json": JSON_TYPE, "msgpack": MSGPACK_TYPE}


def encode_body(body: Mapping[str, object], keys: Keys | None, encoding: Encoding) -> bytes:
    """Write a request body; `keys` become its field `keys`, or `token_ids` with what belongs to them.

    Raises BadRequest for keys that are no keys and token ids that are none.
    """
    fields = encode_fields(body, keys, encoding)
    if encoding == "json":
        return json.dumps(fields, separators=(",", ":")).encode()
    packed: bytes = msgpack.packb(fields)
    return packed


def encode_fields(body: Mapping[str, object], keys: Keys | None, encoding: Encoding) -> Mapping[str, object]:
    """Return an object with keys or a prompt in it, ready to be written in an encoding; raises BadRequest."""
    if isinstance(keys, Prompt):
        return {**body, **_prompt_fields(keys, encoding)}
    if keys is None:
        return body
    if isinstance(keys, str | bytes):
        raise BadRequest("keys must be a sequence of keys, not one key")
    return {**body, **({"keys": [_as_hex(key) for key in keys]} if encoding == "json" else _packed_keys(keys))}


def decode_body(content: bytes, content_type: str) -> object:
    """Read a body, by its media type; raises ValueError when it is neither whole JSON nor whole MessagePack."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type == MSGPACK_TYPE:
        try:
            return msgpack.unpackb(content)
        except (msgpack.UnpackException, TypeError, RecursionError) as error:
            raise ValueError(f"unreadable MessagePack: {error}") from error
    if media_type == JSON_TYPE or media_type.endswith("+json"):
        try:
            return json.loads(content)
        except RecursionError as error:
            raise ValueError("JSON nested too deeply") from error
    raise ValueError(f"media type {media_type or 'absent'}")


def decode_keys(body: Mapping[str, Any]) -> list[bytes]:
    """Return the page keys of a decoded request body, whichever way they were written; raises ValueError."""
    keys = body.get("keys")
    if isinstance(keys, bytes):
        size = body.get("key_bytes")
        if not isinstance(size, int) or size < 1 or len(keys) % size:
            raise ValueError("key_bytes must divide the length of keys")
        return [keys[start : start + size] for start in range(0, len(keys), size)]
    if not isinstance(keys, list):
        raise ValueError("keys must be a list")
    return [key if isinstance(key, bytes) else bytes.fromhex(_as_text(key)) for key in keys]


def decode_prompt(body: Mapping[str, Any]) -> Prompt:
    """Return the prompt of a decoded request body, whichever way it was written; raises ValueError."""
    raw, lora = body.get("token_ids"), body.get("lora")
    if isinstance(raw, bytes) and len(raw) % 4 == 0:
        raw = struct.unpack(f"<{len(raw) // 4}I", raw)
    if not isinstance(raw, list | tuple) or not all(type(token) is int for token in raw):
        raise ValueError("token_ids must be integers, or whole 4-byte numbers")
    try:
        items = [MmItem(**item) for item in body.get("mm", ())]
        lora = LoraAdapter(**lora) if isinstance(lora, dict) else lora
    except TypeError as error:
        raise ValueError("mm and lora must have the members of an item and of an adapter") from error
    return Prompt(raw, body.get("extra_key"), body.get("cache_salt"), lora, items, body.get("include_keys", False))


def encode_slots(slots: Sequence[int], encoding: Encoding) -> list[int] | bytes:
    """Write a slot list the way services do: integers in JSON, little-endian u32 in MessagePack."""
    return list(slots) if encoding == "json" else struct.pack(f"<{len(slots)}I", *slots)


def decode_slots(value: object) -> tuple[int, ...]:
    """Read a slot list in either form; raises ValueError for anything else."""
    if isinstance(value, bytes):
        if len(value) % 4:
            raise ValueError("a slot list in bin form must be whole 4-byte numbers")
        return struct.unpack(f"<{len(value) // 4}I", value)
    if isinstance(value, list) and all(isinstance(slot, int) for slot in value):
        return tuple(value)
    raise ValueError("a slot list must be integers or bin")


def _prompt_fields(prompt: Prompt, encoding: Encoding) -> dict[str, object]:
    lora = prompt.lora
    fields: dict[str, object] = {
        "extra_key": prompt.extra_key,
        "cache_salt": prompt.cache_salt,
        "lora": {"name": lora.name, "path": lora.path} if isinstance(lora, LoraAdapter) else lora,
        "mm": [{"identifier": i.identifier, "offset": i.offset, "length": i.length} for i in prompt.mm] or None,
        "include_keys": prompt.include_keys or None,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    return {"token_ids": _token_ids(prompt.token_ids, encoding), **given}


def _token_ids(token_ids: Sequence[int], encoding: Encoding) -> list[int] | bytes:
    try:
        words = array("I", token_ids)
    except OverflowError:  # what is too wide for 4 bytes goes as a list
        return list(token_ids)
    except TypeError as error:
        raise BadRequest("token ids must be integers") from error
    if encoding == "json":
        return words.tolist()
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _packed_keys(keys: Sequence[Key]) -> dict[str, object]:
    raw = [key if isinstance(key, bytes) else _from_hex(key) for key in keys]
    sizes = {len(key) for key in raw}
    if len(sizes) == 1:
        return {"keys": b"".join(raw), "key_bytes": sizes.pop()}
    return {"keys": raw}


def _as_hex(key: Key) -> str:
    return key.hex() if isinstance(key, bytes) else _as_text(key)


def _from_hex(key: object) -> bytes:
    text = _as_text(key)
    try:
        raw = bytes.fromhex(text)
    except ValueError as error:
        raise BadRequest(f"a page key must be hex: {text[:140]!r}") from error
    if len(raw) * 2 != len(text):  # fromhex skips blanks
        raise BadRequest(f"a page key must be hex: {text[:140]!r}")
    return raw


def _as_text(key: object) -> str:
    if not isinstance(key, str):
        raise BadRequest(f"a page key must be hex or bytes, not {type(key).__name__}")
    return key
