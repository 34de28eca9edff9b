"""Read the configuration: the file, the environment over it, and every mistake in one go."""

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from forestage.config.access import read_text, read_tokens
from forestage.config.environment import overlay
from forestage.config.mistakes import ConfigError, Key, key_text, shown, validation_mistakes
from forestage.config.models import ModelConfig
from forestage.config.relations import (
    component_mistakes,
    lmcache_mistakes,
    name_mistakes,
    pool_mistakes,
    reserve_mistakes,
    shard_mistakes,
    share_mistakes,
    vllm_mistakes,
)
from forestage.config.schema import Config, LeaseConfig, PoolConfig, ServerConfig, StorageConfig, WritesConfig
from forestage.config.tenants import TenantConfig
from forestage.config.tokens import TokenConfig

__all__ = ["load"]

MAX_FILE = 1 << 20  # bytes: a configuration is a few KiB


def load(path: str | None, environ: Mapping[str, str]) -> Config:
    """Return the settings of the TOML file at `path` (None: no file) with the environment's over them.

    Reads the file, and looks once whether the token file can be read. Raises ConfigError with one line for every
    mistake found; a pool that is too small shows only once pool and models are sound by themselves.
    """
    mistakes: list[str] = []
    raw: dict[str, Any] = {}
    if path is not None:
        try:
            raw = _read_toml(path)
        except ValueError as error:
            mistakes.append(f"{path if path.isprintable() else ascii(path)}: {error}")
    unread = bool(mistakes)

    merged, sources, unknown = overlay(raw, environ)
    mistakes += unknown
    config, found = _validate(merged)
    for key, text in found:
        if key == ("models",) and unread:
            continue  # they may well be in the file
        variable = sources.get(key)
        mistakes.append(f"{key_text(key)}: {text}" + (f" (from {variable})" if variable else ""))
    if mistakes or config is None:
        raise ConfigError(mistakes)
    return config


def _read_toml(path: str) -> dict[str, Any]:
    text = read_text(path, MAX_FILE)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("is not valid TOML: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not valid TOML: {error}") from None


def _validate(raw: dict[str, Any]) -> tuple[Config | None, list[tuple[Key, str]]]:
    config: Config | None = None
    mistakes: list[tuple[Key, str]] = []
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        mistakes = validation_mistakes(Config, error)
    mistakes += _between(raw, [key for key, _ in mistakes])
    return config, mistakes


def _between(raw: dict[str, Any], bad: list[Key]) -> Iterator[tuple[Key, str]]:
    yield from _caller_mistakes(raw, bad)
    tables = raw.get("models")
    tables = tables if isinstance(tables, list) else []
    yield from name_mistakes(tables, ("models",))
    for index, table in enumerate(tables):
        yield from component_mistakes(table, ("models", index))

    sound = {i: ModelConfig.model_validate(t) for i, t in enumerate(tables) if not _any_under(("models", i), bad)}
    if not _any_under(("storage",), bad):
        storage = StorageConfig.model_validate(raw.get("storage", {}))
        named = {
            "hicache-file": shard_mistakes,
            "vllm-file": vllm_mistakes,
            "lmcache-file": lmcache_mistakes,
            "lmcache-redis": lmcache_mistakes,
        }
        if storage.kind in named:
            for index, model in sound.items():
                yield from named[storage.kind](model, ("models", index))
    if tables and len(sound) == len(tables) and not _any_under(("pool",), bad):
        yield from pool_mistakes(PoolConfig.model_validate(raw.get("pool", {})), sound)


def _caller_mistakes(raw: dict[str, Any], bad: list[Key]) -> Iterator[tuple[Key, str]]:
    """Yield what is wrong with tenants and with the tokens that say who calls, the service-wide one among them."""
    files: dict[Key, str] = {}
    if not _any_under(("server",), bad):
        files["server", "token_file"] = ServerConfig.model_validate(raw.get("server", {})).token_file
    tables = _tables(raw, "tenants")
    yield from name_mistakes(tables, ("tenants",))
    sound = {i: TenantConfig.model_validate(t) for i, t in enumerate(tables) if not _any_under(("tenants", i), bad)}
    if len(sound) == len(tables):
        yield from share_mistakes(sound)
        if not any(_any_under((section,), bad) for section in ("pool", "lease", "writes")):
            yield from reserve_mistakes(
                PoolConfig.model_validate(raw.get("pool", {})),
                LeaseConfig.model_validate(raw.get("lease", {})),
                WritesConfig.model_validate(raw.get("writes", {})),
                sound.values(),
            )
    files |= {("tenants", i, "token_file"): tenant.token_file for i, tenant in sound.items()}
    for i, table in enumerate(_tables(raw, "tokens")):
        if not _any_under(("tokens", i), bad):
            token = TokenConfig.model_validate(table)
            files["tokens", i, "token_file"] = token.token_file
            if token.tenant and len(sound) == len(tables) and token.tenant not in {t.name for t in sound.values()}:
                yield ("tokens", i, "tenant"), f"no tenant is called {shown(token.tenant)}"
    yield from read_tokens(files)[1]


def _tables(raw: dict[str, Any], array: str) -> list[Any] | tuple[Any, ...]:
    tables = raw.get(array)
    return tables if isinstance(tables, list | tuple) else []


def _any_under(table: Key, bad: list[Key]) -> bool:
    return any(key[: len(table)] == table for key in bad)
