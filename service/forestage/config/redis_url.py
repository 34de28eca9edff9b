"""The Redis URL, which may hold a password.

Law: of an accepted URL only what `mask_redis_url` returns may be shown; of a refused one, nothing.
"""

import re
from typing import Annotated
from urllib.parse import unquote_plus

from pydantic import AfterValidator

from forestage.config.redis_target import MASK, redis_target, split_redis_url
from forestage.config.words import Text

__all__ = ["MASK", "RedisUrl", "is_secret_name", "mask_redis_url"]

_SECRET = re.compile(r"pass|secret|token", re.IGNORECASE)
_EXAMPLE = "; write it like redis://user:password@host:6379/0"


def _redis_url(url: str) -> str:
    try:
        redis_target(url)
    except ValueError as error:
        raise ValueError(f"{error}{_EXAMPLE}") from None
    return url


def is_secret_name(name: str) -> bool:
    """Say whether the value of this name, as the query of a URL has it, is a secret."""
    return _SECRET.search(unquote_plus(name)) is not None


def mask_redis_url(url: str) -> str:
    """Return an accepted URL with its password, and secrets in its query, replaced by asterisks."""
    scheme, user, hosts, path, query = split_redis_url(url)
    name, colon, _ = user.partition(":")
    at = "@" if "@" in url.partition("?")[0] else ""
    masked = f"{scheme}://{name}{colon}{MASK if colon else ''}{at}{hosts}{path}"
    if query is None:
        return masked
    pairs = [pair.partition("=") for pair in query.split("&")]
    return f"{masked}?" + "&".join(
        f"{key}={MASK}" if is_secret_name(key) else key + eq + value for key, eq, value in pairs
    )


RedisUrl = Annotated[Text, AfterValidator(_redis_url)]
