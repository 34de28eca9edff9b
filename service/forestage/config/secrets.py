"""The secrets that a configuration holds or names, so that they can be kept out of what is shown.

Law: nothing here is to be printed; whoever shows text masks these words in it.
"""

from urllib.parse import unquote, unquote_plus

from forestage.config.access import read_token, token_files
from forestage.config.redis_target import split_redis_url
from forestage.config.redis_url import is_secret_name
from forestage.config.schema import Config

__all__ = ["secrets_of"]


def secrets_of(config: Config) -> set[str]:
    """Return the tokens and passwords of a configuration, as they are written and as they are meant.

    Token files that cannot be read are passed over: the start refuses them.
    """
    found = set()
    for path, _ in token_files(config).values():
        try:
            found.add(read_token(path))
        except ValueError:
            continue
    for _, section in config.storage:
        url = getattr(section, "url", None)
        if url is not None:
            found |= _secrets_of_url(url)
    return found - {""}


def _secrets_of_url(url: str) -> set[str]:
    _, user, _, _, query = split_redis_url(url)
    password = user.partition(":")[2]
    found = {password, unquote(password)}
    for name, _, value in (pair.partition("=") for pair in (query or "").split("&")):
        if is_secret_name(name):
            found |= {value, unquote_plus(value)}
    return found
