"""Write the effective configuration as TOML, without secrets.

Law: what is written loads again as an equal configuration, except for masked passwords.
"""

import json
from typing import Any

from forestage.config.quantities import show_bytes, show_mode
from forestage.config.redis_url import mask_redis_url
from forestage.config.schema import Config
from forestage.config.section import Section

__all__ = ["render"]


def render(config: Config) -> str:
    """Return every setting, defaults included, as TOML text; passwords read `****`."""
    lines: list[str] = []
    for name in ("server", "pool", "storage", "prefetch", "lease", "writes", "events"):
        _table(getattr(config, name), name, lines)
    for token in config.tokens:
        lines += ["", "[[tokens]]", *_pairs(token)]
    for tenant in config.tenants:
        lines += ["", "[[tenants]]", *_pairs(tenant)]
    for model in config.models:
        lines += ["", "[[models]]", *_pairs(model)]
        for naming in ("hicache", "vllm", "lmcache"):
            lines.append(f"{naming} = {{{', '.join(_pairs(getattr(model, naming)))}}}")
        if model.hash is not None:
            lines.append(f"hash = {{{', '.join(_pairs(model.hash))}}}")
        for component in model.components:
            lines += ["", "[[models.components]]", *_pairs(component)]
    return "\n".join(lines[1:]) + "\n"


def _table(section: Section, name: str, lines: list[str]) -> None:
    lines += ["", f"[{name}]", *_pairs(section)]
    for key, value in _items(section):
        if isinstance(value, Section):
            _table(value, f"{name}.{key}", lines)


def _items(section: Section) -> list[tuple[str, Any]]:
    return [(field.alias or name, getattr(section, name)) for name, field in type(section).model_fields.items()]


def _pairs(section: Section) -> list[str]:
    plain = [(key, value) for key, value in _items(section) if not isinstance(value, Section | tuple | None)]
    return [f"{key} = {_value(key, value)}" for key, value in plain]


def _value(key: str, value: object) -> str:
    if key == "url" and isinstance(value, str):
        value = mask_redis_url(value)
    elif key in ("bytes", "max_body_bytes") and isinstance(value, int):
        value = show_bytes(value)
    elif key == "mode" and isinstance(value, int):
        value = show_mode(value)
    # Texts are printable and numbers finite: what JSON writes for them is TOML too.
    return json.dumps(value, ensure_ascii=False)
