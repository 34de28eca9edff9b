"""Configuration files for services that tests start."""

from pathlib import Path

__all__ = ["write_config"]

_MODEL = """
[[models]]
name = "{name}"
page_tokens = 16
shards = {shards}
{hash_line}
[[models.components]]
name = "kv"
bytes = {page_bytes}
slots = {slots}
"""


def write_config(
    folder: Path,
    *,
    slots: int = 64,
    page_bytes: int = 4096,
    states: int = 0,
    shards: int = 1,
    pool_bytes: str = "64MiB",
    more: str = "",
    name: str = "m",
    scheme: str = "",
    **sections: str,
) -> Path:
    """Write a configuration with one model over a directory below `folder`; `sections` are lines by section.

    `scheme` is that of its page keys, if token ids are to be taken.
    """
    body = {"server": "port = 0", "storage": 'kind = "file"', **sections}
    lines = [f'[pool]\npath = "{folder}/pool"\nbytes = "{pool_bytes}"\npin = "none"\n{body.pop("pool", "")}']
    lines += [f"[{section}]\n{text}" for section, text in body.items()]
    if "file" in body["storage"] and "storage.file" not in body and "hicache" not in body["storage"]:
        lines.append(f'[storage.file]\nroot = "{folder}/l3"')
    hash_line = f'hash = {{scheme = "{scheme}"}}' if scheme else ""
    lines.append(_MODEL.format(name=name, page_bytes=page_bytes, slots=slots, shards=shards, hash_line=hash_line))
    if states:
        lines.append(f'[[models.components]]\nname = "state"\nbytes = {page_bytes}\nslots = {states}\ncovers = "tail"')
    lines.append(more)
    path = folder / "forestage.toml"
    path.write_text("\n".join(lines))
    return path
