"""The Redis URL, which may hold a password.

Law: of an accepted URL only what `mask_redis_url` returns may be shown; of a refused one, nothing.
"""

import re
from typing import Annotated
from urllib.parse import unquote_plus, urlsplit

from pydantic import AfterValidator

from forestage.config.words import Text

__all__ = ["MASK", "RedisUrl", "mask_redis_url"]

MASK = "****"
_SECRET = re.compile(r"pass|secret|token", re.IGNORECASE)
_EXAMPLE = "; write it like redis://user:password@host:6379/0"
_NO_HOST = "must have a host, and a port from 1 to 65535 if any"
_NO_SOCKET = "must name a socket, as unix:///run/redis.sock does"


def _fault(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its text would quote the part that may be a password
        return _NO_HOST
    # A password with a bare / ? # or @ is split at the wrong place, and half of it would count as no secret.
    if "#" in url or "@" in parts.path + parts.query or parts.netloc.count("@") > 1:
        return "must have / ? # @ of user and password percent-encoded"
    if not url.startswith(("redis://", "rediss://", "unix://")):
        return "must begin with redis://, rediss:// or unix://"
    if parts.password == MASK:
        return "has its password masked"
    if parts.scheme == "unix":
        only_a_user = parts.netloc == "" or parts.netloc.endswith("@")
        return None if only_a_user and parts.path not in ("", "/") else _NO_SOCKET
    if not parts.hostname or port == 0:
        return _NO_HOST
    if not re.fullmatch(r"/?[0-9]{0,9}", parts.path):
        return "must have nothing but a database number behind the host"
    return None


def _redis_url(url: str) -> str:
    if fault := _fault(url):
        raise ValueError(fault + _EXAMPLE)
    return url


def mask_redis_url(url: str) -> str:
    """Return an accepted URL with its password, and secrets in its query, replaced by asterisks."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    name, colon, _ = user.partition(":")
    netloc = f"{name}{colon}{MASK if colon else ''}{at}{host}"
    pairs = [pair.partition("=") for pair in parts.query.split("&")]
    query = "&".join(f"{key}={MASK}" if _SECRET.search(unquote_plus(key)) else key + eq + v for key, eq, v in pairs)
    return f"{parts.scheme}://{netloc}{parts.path}" + ("?" if "?" in url else "") + query


RedisUrl = Annotated[Text, AfterValidator(_redis_url)]
