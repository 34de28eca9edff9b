"""What is wrong with a configuration, in words: one line a mistake, beginning with the key.

Law: a line holds no line break, and never a value of a key that may hold a secret.
"""

import difflib
import json
import re
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ValidationError

from forestage.core.errors import StartError

__all__ = ["ConfigError", "Key", "close_to", "key_text", "shown", "validation_mistakes"]

Key = tuple[str | int, ...]

_BARE = re.compile(r"[A-Za-z0-9_-]{1,60}")
_SECRET_KEYS: frozenset[Key] = frozenset({("storage", kind, "url") for kind in ("redis", "lmcache-redis")})
_LONGEST_SHOWN = 60  # characters

_RULES = {
    "bool_type": "must be true or false",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:.17g}",
    "int_from_float": "must be an integer",
    "int_type": "must be an integer",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:.17g}",
    "literal_error": "must be {expected}",
    "string_type": "must be text",
    "string_unicode": "must be printable text",
    "value_error": "{error}",
}
_RULES_WITHOUT_VALUE = {
    "missing": "is missing",
    "model_type": "must be a table",
    "no_seed": "must be the PYTHONHASHSEED that vLLM runs with: without one its hashes are random",
    "no_tables": "is empty",
    "tuple_type": "must be an array of tables",
}
_ARRAYS = {
    "models": "[[models]]",
    "components": "[[models.components]]",
    "tenants": "[[tenants]]",
    "tokens": "[[tokens]]",
}


class ConfigError(StartError):
    """The configuration is wrong. `mistakes` has one line for each thing to change, naming the key."""

    slug = "config"

    def __init__(self, mistakes: Sequence[str]) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = list(mistakes)


def key_text(key: Key) -> str:
    """Return a key as one writes it, like `models[0].components[1].window`."""
    text = ""
    for part in key:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if _BARE.fullmatch(part) else shown(part))
    return text


def shown(value: object) -> str:
    """Return a value on one line, cut where it is long. Of tables and arrays, only that they are such."""
    if isinstance(value, dict | list):  # whose nesting may be too deep to print
        return "a table" if isinstance(value, dict) else "an array"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 128:  # Python refuses to print very long ones
        return "a far larger or smaller number"
    text = json.dumps(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."


def close_to(word: str, words: Iterable[str], prefix: str = "") -> str:
    """Return ", did you mean X" for the most similar of `words`, behind `prefix`, or nothing."""
    similar = difflib.get_close_matches(word, list(words), n=1)
    return f", did you mean {prefix}{similar[0]}" if similar else ""


def _known_keys(kind: type[BaseModel], table: Key) -> list[str]:
    for part in table:
        if isinstance(part, str):
            names = {field.alias or name: field for name, field in kind.model_fields.items()}
            inner = names[part].annotation
            kind = next(k for k in (inner, *getattr(inner, "__args__", ())) if _is_table(k))
    return [field.alias or name for name, field in kind.model_fields.items()]


def _is_table(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def validation_mistakes(kind: type[BaseModel], error: ValidationError) -> list[tuple[Key, str]]:
    """Return each key that did not validate as `kind`, with what it must be."""
    found: list[tuple[Key, str]] = []
    for detail in error.errors(include_url=False):
        key, rule, context = detail["loc"], detail["type"], detail.get("ctx", {})
        if rule == "extra_forbidden":
            text = "unknown key" + close_to(str(key[-1]), _known_keys(kind, key[:-1]))
        elif rule in _RULES_WITHOUT_VALUE:
            text = _RULES_WITHOUT_VALUE[rule]
            if key and key[-1] in _ARRAYS:
                text += f": write at least one {_ARRAYS[str(key[-1])]}"
        else:
            text = _RULES[rule].format(**context) if rule in _RULES else detail["msg"]
            if rule == "literal_error":
                text = text.replace("'", '"')
            if key not in _SECRET_KEYS:
                text += f", got {shown(detail['input'])}"
        found.append((key, text))
    return found
