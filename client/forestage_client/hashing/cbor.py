"""Canonical CBOR (RFC 8949, section 4.2.1) of what block hashes are made of. Nothing is decoded here.

Law: equal values give equal bytes, and every length and integer takes the fewest bytes that hold it.
"""

from collections.abc import Sequence

__all__ = ["Plain", "encode", "encode_array_head", "encode_bytes_head", "encode_uints"]

Plain = None | int | str | bytes | Sequence["Plain"]
"""What can be encoded: integers of up to 64 bits, text, bytes, sequences of such, and None. Booleans cannot."""

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY = range(0, 5 << 5, 1 << 5)  # the major type is in the top three bits
_ONE_BYTE, _TWO_BYTES, _FOUR_BYTES, _EIGHT_BYTES = range(24, 28)
_NULL = b"\xf6"
_SMALL_UINTS = [bytes([number] if number < _ONE_BYTE else [_ONE_BYTE, number]) for number in range(256)]


def encode(value: Plain) -> bytes:
    """Encode one value. Raises TypeError for what cannot be encoded and ValueError for integers out of range."""
    if value is None:
        return _NULL
    if isinstance(value, bytes):
        return _head(_BYTES, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _head(_TEXT, len(text)) + text
    if isinstance(value, bool):
        raise TypeError("booleans are not encoded: they would pass for integers")
    if isinstance(value, int):
        return _head(_UNSIGNED, value) if value >= 0 else _head(_NEGATIVE, -1 - value)
    if isinstance(value, list | tuple):
        return encode_array_head(len(value)) + b"".join(map(encode, value))
    raise TypeError(f"{type(value).__name__} is not encoded")


def encode_array_head(length: int) -> bytes:
    """Encode the beginning of an array of `length` elements, which must follow."""
    return _head(_ARRAY, length)


def encode_bytes_head(length: int) -> bytes:
    """Encode the beginning of a byte string of `length` bytes, which must follow."""
    return _head(_BYTES, length)


def encode_uints(numbers: Sequence[int]) -> bytes:
    """Encode an array of integers from 0 to 2**32 - 1, which the caller has checked: `encode`, but faster."""
    # Token ids mostly take three or five bytes, and one call for each is all that a prompt of 128k has time for.
    encoded = [
        (0x1A00000000 | number).to_bytes(5, "big")
        if number > 0xFFFF
        else (0x190000 | number).to_bytes(3, "big")
        if number > 0xFF
        else _SMALL_UINTS[number]
        for number in numbers
    ]
    return encode_array_head(len(encoded)) + b"".join(encoded)


def _head(major: int, number: int) -> bytes:
    if number < _ONE_BYTE:
        return bytes([major | number])
    for code, size in ((_ONE_BYTE, 1), (_TWO_BYTES, 2), (_FOUR_BYTES, 4), (_EIGHT_BYTES, 8)):
        if number < 1 << 8 * size:
            return bytes([major | code]) + number.to_bytes(size, "big")
    raise ValueError("integers have at most 64 bits")
