"""Sizes and file modes as people write them, turned into integers and back.

Law: `parse_bytes(show_bytes(n)) == n` for every size allowed, and `parse_mode(show_mode(m)) == m`.
"""

import re
from fractions import Fraction
from typing import Annotated

from pydantic import BeforeValidator

__all__ = ["MAX_BYTES", "Bytes", "Mode", "parse_bytes", "parse_mode", "show_bytes", "show_mode"]

MAX_BYTES = 1 << 50  # 1 PiB: anything above is a slip of the keyboard

_BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50}
_DECIMAL = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_FACTORS = {"": 1} | _BINARY | _DECIMAL
_TEXT = re.compile(r"(?P<number>[0-9]{1,20}(?:\.[0-9]{1,20})?) ?(?P<unit>[kKMGTP]?i?)B?")
_OCTAL = re.compile(r"0?[0-7]{3}")


def parse_bytes(value: object) -> int:
    """Return a size in bytes: an integer, or text such as "1GiB", "64Gi", "1.5GiB", "512MB" or "1024".

    Units with an `i` count in 1024, the others in 1000; a trailing B changes nothing; a fraction of a byte is
    dropped. Raises ValueError for everything else, and for sizes outside 1 byte to 1 PiB.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _TEXT.fullmatch(value)) and match["unit"] in _FACTORS:
        size = int(Fraction(match["number"]) * _FACTORS[match["unit"]])
    else:
        raise ValueError('must be a size such as 1048576, "64Mi", "1.5GiB" or "512MB"')
    if not 1 <= size <= MAX_BYTES:
        raise ValueError("must be from 1 byte to 1 PiB")
    return size


def show_bytes(size: int) -> int | str:
    """Return the shortest exact form: text with the largest binary unit that divides the size, else the number."""
    for unit, factor in reversed(_BINARY.items()):
        if size % factor == 0:
            return f"{size // factor}{unit}B"
    return size


def parse_mode(value: object) -> int:
    """Return the permission bits of octal text such as "0660". Raises ValueError for everything else.

    The owner must keep read and write, since the service itself opens the file anew after a restart.
    """
    if not (isinstance(value, str) and _OCTAL.fullmatch(value)):
        raise ValueError('must be octal text such as "0660"')
    mode = int(value, 8)
    if mode & 0o600 != 0o600:
        raise ValueError('must let the owner read and write, as "0600" does')
    return mode


def show_mode(mode: int) -> str:
    """Return permission bits as the octal text that `parse_mode` takes."""
    return f"0{mode:03o}"


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Mode = Annotated[int, BeforeValidator(parse_mode)]
