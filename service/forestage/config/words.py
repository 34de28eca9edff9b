"""Texts among the settings: names, tags and paths.

Law: an accepted text is printable and valid UTF-8, so that it can stand in logs, metrics and file names as it is.
"""

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

__all__ = [
    "ComponentName",
    "Endpoint",
    "FolderName",
    "Host",
    "LmcacheName",
    "Name",
    "Path",
    "Prefix",
    "ReplayEndpoint",
    "Salt",
    "ServedName",
    "SocketPath",
    "Tag",
    "Text",
    "Topic",
    "is_name",
]

MAX_NAME = 128  # bytes
MAX_PATH = 4000  # bytes: Linux takes 4095
MAX_SOCKET_PATH = 107  # bytes: sun_path without its closing zero
_ENDPOINT = (
    r"tcp://(\*|[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?\]):(\*|[0-9]{1,5})|ipc:///[^\s]{1,100}"
)


def is_name(value: object) -> bool:
    """Say whether this can name a model: printable text without spaces, 1 to 128 bytes of UTF-8."""
    return isinstance(value, str) and value.isprintable() and " " not in value and 1 <= len(value.encode()) <= MAX_NAME


def _text(value: str) -> str:
    if not value.isprintable():  # also false for what is not UTF-8: the environment delivers that as surrogates
        raise ValueError("must be printable text")
    return value


def _name(value: object) -> object:
    if isinstance(value, str) and not is_name(value):
        raise ValueError(f"must be 1 to {MAX_NAME} bytes of printable text without spaces")
    return value


def _served_name(value: object) -> object:
    return value if value == "" else _name(value)


def _at_most(limit: int) -> AfterValidator:
    def check(value: str) -> str:
        if len(value.encode(errors="replace")) > limit:
            raise ValueError(f"must be at most {limit} bytes long")
        return value

    return AfterValidator(check)


def _shaped(pattern: str, rule: str) -> AfterValidator:
    shape = re.compile(pattern)

    def check(value: str) -> str:
        if not shape.fullmatch(value):
            raise ValueError(rule)
        return value

    return AfterValidator(check)


Text = Annotated[str, AfterValidator(_text)]
Name = Annotated[str, BeforeValidator(_name)]
ServedName = Annotated[str, BeforeValidator(_served_name)]
ComponentName = Annotated[str, _shaped(r"[A-Za-z0-9_-]{1,32}", "must be 1 to 32 characters of A-Z a-z 0-9 _ -")]
Tag = Annotated[str, _shaped(r"[A-Za-z0-9._-]{1,64}", "must be 1 to 64 characters of A-Z a-z 0-9 . _ -")]
Host = Annotated[
    str, _shaped(r"[A-Za-z0-9.:%_-]{1,253}", "must be a host name or an address, without brackets or port")
]
Prefix = Annotated[str, _shaped(r"[!-z|~]{1,128}", "must be 1 to 128 visible ASCII characters without braces")]
FolderName = Annotated[Text, _shaped(r"(?!\.{1,2}$)[^/]{0,255}", "must be the name of a folder, without slashes")]
LmcacheName = Annotated[Name, _shaped(r"[^@]+", "must not contain an at sign, which LMCache forbids")]
Salt = Annotated[Text, _shaped(r"[^@/\\]{0,128}", "must be at most 128 characters without @, / and \\")]
Path = Annotated[Text, _shaped(r".+", "must not be empty"), _at_most(MAX_PATH)]
Endpoint = Annotated[Text, _shaped(_ENDPOINT, "must be like tcp://127.0.0.1:5557, tcp://*:5557 or ipc:///run/kv.sock")]
Topic = Annotated[Text, _at_most(256)]
ReplayEndpoint = Annotated[Text, _shaped(f"(?:{_ENDPOINT})?", "must be empty, or like tcp://127.0.0.1:5558")]
SocketPath = Annotated[Text, _at_most(MAX_SOCKET_PATH)]
