"""Who may call: the tokens that a configuration names, read from their files.

Law: no two tokens are equal, so each says who calls; and no text here, errors included, holds one.
"""

from collections.abc import Mapping

from forestage.config.mistakes import ConfigError, Key, key_text, shown
from forestage.config.schema import Config
from forestage.config.tokens import MAX_TOKENS
from forestage.core.roles import Caller, Grant, Role

__all__ = ["read_grants", "read_text", "read_token", "read_tokens", "token_files"]

MAX_TOKEN = 4096  # bytes


def read_token(path: str) -> str:
    """Return the secret that a token file holds, without the space around it.

    Raises ValueError when the file cannot be read, is empty or too long, or holds what no header can carry.
    """
    token = read_text(path, MAX_TOKEN).strip()
    if not token:
        raise ValueError("holds no token")
    if not (token.isascii() and token.isprintable()) or b" " in token.encode():
        raise ValueError("must hold one token of visible ASCII characters")
    return token


def read_text(path: str, limit: int) -> str:
    """Return the text of a file of at most `limit` bytes. Raises ValueError, which says why not."""
    try:
        with open(path, "rb") as file:
            content = file.read(limit + 1)
        text = content.decode("utf-8-sig")  # some editors put a byte order mark in front
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start})") from None
    if len(content) > limit:
        raise ValueError(f"is larger than {limit} bytes")
    return text


def token_files(config: Config) -> dict[Key, tuple[str, Caller]]:
    """Return the files that hold tokens, by the key that names each, and whom they stand for."""
    files: dict[Key, tuple[str, Caller]] = {("server", "token_file"): (config.server.token_file, Caller())}
    for i, tenant in enumerate(config.tenants):
        files["tenants", i, "token_file"] = tenant.token_file, Caller(Role.ADMIN, tenant.name)
    for i, token in enumerate(config.tokens):
        files["tokens", i, "token_file"] = token.token_file, Caller(Role[token.role.upper()], token.tenant or None)
    return {key: named for key, named in files.items() if named[0]}


def read_tokens(files: Mapping[Key, str]) -> tuple[dict[Key, str], list[tuple[Key, str]]]:
    """Read these token files (an empty path: none); return the tokens, and which of them are no good and why."""
    tokens: dict[Key, str] = {}
    mistakes: list[tuple[Key, str]] = []
    if len(files) > MAX_TOKENS:
        text = f"at most {MAX_TOKENS} can be configured, those of tenants included, got {len(files)}"
        return {}, [(("tokens",), text)]
    first: dict[str, Key] = {}
    for key, path in files.items():
        if not path:
            continue
        try:
            token = read_token(path)
        except ValueError as error:
            mistakes.append((key, f"{shown(path)} {error}"))
            continue
        if token in first:
            same = f"holds the same token as {key_text(first[token])}, so it would not tell who calls"
            mistakes.append((key, f"{shown(path)} {same}"))
        first.setdefault(token, key)
        tokens[key] = token
    return tokens, mistakes


def read_grants(config: Config) -> tuple[Grant, ...]:
    """Read every token of a configuration; empty when none is configured.

    Raises ConfigError: the files may have changed since the configuration was loaded.
    """
    files = token_files(config)
    tokens, mistakes = read_tokens({key: path for key, (path, _) in files.items()})
    if mistakes:
        raise ConfigError([f"{key_text(key)}: {text}" for key, text in mistakes])
    return tuple(Grant(tokens[key], caller) for key, (_, caller) in files.items())
