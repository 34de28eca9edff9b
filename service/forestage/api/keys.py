"""Page keys on the wire: hex text, bytes, or one packed blob; inside the service always bytes."""

from collections.abc import Sequence

from forestage.core.errors import BadRequestError, TooLargeError

__all__ = ["MAX_KEY_BYTES", "MIN_KEY_BYTES", "parse_keys"]

MIN_KEY_BYTES = 16
MAX_KEY_BYTES = 64


def parse_keys(raw: object, key_bytes: object, max_pages: int) -> tuple[bytes, ...]:
    """Return page keys in order.

    `raw` is a list of hex texts or bytes, or one bytes object of keys of `key_bytes` each. Raises BadRequestError for
    anything else, a key of fewer than 16 or more than 64 bytes, or a duplicate; TooLargeError for too many.
    """
    if isinstance(raw, bytes):
        keys = _cut(raw, key_bytes)
    elif key_bytes is not None:
        raise BadRequestError("key_bytes: only for keys that are one packed blob")
    elif isinstance(raw, list):
        if len(raw) > max_pages:
            raise TooLargeError(f"keys: {len(raw)} pages asked, at most {max_pages}")
        keys = _from_list(raw)
    else:
        raise BadRequestError("keys: must be a list of page keys")
    if len(keys) > max_pages:
        raise TooLargeError(f"keys: {len(keys)} pages asked, at most {max_pages}")
    if len(set(keys)) != len(keys):
        raise BadRequestError("keys: a page key occurs twice", slug="duplicate-key")
    return keys


def _cut(packed: bytes, key_bytes: object) -> tuple[bytes, ...]:
    if not isinstance(key_bytes, int) or isinstance(key_bytes, bool) or not MIN_KEY_BYTES <= key_bytes <= MAX_KEY_BYTES:
        raise BadRequestError(f"key_bytes: must be {MIN_KEY_BYTES} to {MAX_KEY_BYTES} for packed keys")
    if len(packed) % key_bytes:
        raise BadRequestError(f"keys: {len(packed)} bytes are no whole number of keys of {key_bytes}")
    return tuple(packed[at : at + key_bytes] for at in range(0, len(packed), key_bytes))


def _from_list(raw: Sequence[object]) -> tuple[bytes, ...]:
    try:
        keys = tuple(map(bytes.fromhex, raw))  # type: ignore[arg-type]  # what is no text raises
    except (TypeError, ValueError):
        return _one_by_one(raw)
    lengths = set(map(len, keys))
    # fromhex passes over spaces, so a text may only be longer than its key has digits
    is_exact = sum(map(len, raw)) == 2 * sum(map(len, keys))  # type: ignore[arg-type]
    if is_exact and (not keys or (min(lengths) >= MIN_KEY_BYTES and max(lengths) <= MAX_KEY_BYTES)):
        return keys
    return _one_by_one(raw)


def _one_by_one(raw: Sequence[object]) -> tuple[bytes, ...]:
    """Return the keys of a list that is not all good hex text, or say where it is wrong."""
    keys = []
    for at, item in enumerate(raw):
        if isinstance(item, str):
            try:
                key = bytes.fromhex(item)
            except ValueError:
                raise BadRequestError(f"keys[{at}]: not hex") from None
            if len(item) != 2 * len(key):  # fromhex passes over spaces
                raise BadRequestError(f"keys[{at}]: not hex")
        elif isinstance(item, bytes):
            key = item
        else:
            raise BadRequestError(f"keys[{at}]: must be hex text or bytes")
        if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
            raise BadRequestError(f"keys[{at}]: {len(key)} bytes, must be {MIN_KEY_BYTES} to {MAX_KEY_BYTES}")
        keys.append(key)
    return tuple(keys)
