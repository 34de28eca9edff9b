"""The value format of our own stores: the payload, then a trailer of fixed size that vouches for it.

Law: a value is exactly its payload and `TRAILER_BYTES` more, and the trailer equals, byte for byte, the one that `seal`
makes from the payload and from the name it was found under. Nothing read from a value is ever used as a length.

    offset  bytes  little endian
         0      8  magic
         8      4  version
        12      4  key length in bytes
        16      8  payload length in bytes
        24      8  xxh3-64 of the payload, seeded with fingerprint, component and shard
        32     64  page key, padded with zeros
"""

import hashlib
import struct

import xxhash

from forestage.storage.base import Buffer

__all__ = ["TRAILER_BYTES", "seal", "seed_of", "verify"]

_MAGIC = b"FORESTAG"
_VERSION = 1
_TRAILER = struct.Struct("<8sIIQQ64s")
TRAILER_BYTES = _TRAILER.size


def seed_of(fingerprint: str, component: str, shard: int) -> int:
    """Return the checksum's 64-bit seed: it refuses a value that lies under another model, component or shard."""
    named = f"{fingerprint}\0{component}\0{shard}".encode()
    return int.from_bytes(hashlib.sha256(named).digest()[:8], "little")


def seal(payload: Buffer, key: bytes, seed: int) -> bytes:
    """Return the trailer of a value; `payload` is a contiguous buffer of bytes and is not copied."""
    checksum = xxhash.xxh3_64_intdigest(payload, seed)
    return _TRAILER.pack(_MAGIC, _VERSION, len(key), len(payload), checksum, key)


def verify(trailer: Buffer, payload: Buffer, key: bytes, seed: int) -> bool:
    """Say whether `trailer` is the one that belongs to this payload under this name."""
    return bytes(trailer) == seal(payload, key, seed)
