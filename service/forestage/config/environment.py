"""Settings from environment variables: `FORESTAGE_<SECTION>__<KEY>`, hyphens written `_`.

Law: every setting outside `[[models]]`, `[[tenants]]` and `[[tokens]]` has exactly one variable, and a variable that
belongs to none is a mistake.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from forestage.config.mistakes import Key, close_to, shown
from forestage.config.schema import Config

__all__ = ["PREFIX", "overlay", "variables"]

PREFIX = "FORESTAGE_"
_ARRAYS = ("models", "tenants", "tokens")

_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_SERVICE_LINK = re.compile(r"(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_.+)?)?)")


def _leaves(kind: type[BaseModel], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    for name, field in kind.model_fields.items():
        key = (*above, field.alias or name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _leaves(field.annotation, key)
        elif key not in {(array,) for array in _ARRAYS}:
            yield key, field


def variables() -> dict[str, tuple[str, ...]]:
    """Return the key that each environment variable sets."""
    return {_variable(key): key for key, _ in _leaves(Config, ())}


def _variable(key: tuple[str, ...]) -> str:
    return PREFIX + "__".join(part.replace("-", "_").upper() for part in key)


def _from_text(field: FieldInfo, text: str) -> object:
    # What does not look like the wanted type stays text, and validation says what it must be.
    if any(isinstance(step, BeforeValidator) for step in field.metadata):
        return text
    if field.annotation is int and _INTEGER.fullmatch(text):
        return int(text)
    if field.annotation is float and _NUMBER.fullmatch(text):
        return float(text)
    if field.annotation is bool:
        return {"true": True, "false": False, "1": True, "0": False}.get(text.lower(), text)
    return text


def _unknown(name: str, known: Mapping[str, object]) -> str:
    rest = name.removeprefix(PREFIX)
    for array in _ARRAYS:
        if rest == array.upper() or rest.startswith(array.upper() + "_"):
            return f"{array} come only from the file"
    made_by_kubernetes = _SERVICE_LINK.fullmatch(rest)
    hint = "; if Kubernetes made it for a Service, set enableServiceLinks: false in the pod"
    similar = close_to(rest, (key.removeprefix(PREFIX) for key in known), PREFIX)
    return "unknown variable" + similar + (hint if made_by_kubernetes else "")


def overlay(raw: dict[str, Any], environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[Key, str], list[str]]:
    """Lay the variables over what the file says, which is left as it is.

    Returns the tables, the variable behind each key it set, and a line for every variable that sets nothing.
    """
    merged = dict(raw)
    sources: dict[Key, str] = {}
    mistakes: list[str] = []
    known = {_variable(key): (key, field) for key, field in _leaves(Config, ())}
    for name in sorted(name for name in environ if name.startswith(PREFIX)):
        if name not in known:
            mistakes.append(f"{name if name.isprintable() else shown(name)}: {_unknown(name, known)}")
            continue
        key, field = known[name]
        table: dict[str, Any] | None = merged
        for part in key[:-1]:
            table = _own_copy(table, part)
        if table is not None:  # else the file has something there that is no table, and validation says so
            table[key[-1]] = _from_text(field, environ[name])
            sources[key] = name
    return merged, sources, mistakes


def _own_copy(table: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    inner = None if table is None else table.get(name, {})
    if table is None or not isinstance(inner, dict):
        return None
    copied = dict(inner)
    table[name] = copied
    return copied
