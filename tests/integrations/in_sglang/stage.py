"""A service over an SGLang directory, the adapter as SGLang's factory makes it, and SGLang's file backend."""

import os
from array import array
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from integrations.in_sglang.loading import VERSION

__all__ = ["MODEL", "PAGE_TOKENS", "extra_config", "file_backend", "hashes_of", "make_backend", "set_up", "slots_of"]

MODEL = "acme/tiny"
PAGE_TOKENS = 16

_CONFIG = """
[server]
port = 0
uds = "{home}/s"
regions_uds = "{regions}"
[pool]
path = "{home}/pool"
bytes = "32MiB"
pin = "none"
[storage]
kind = "hicache-file"
[storage.hicache-file]
root = "{home}/l3"
[[models]]
name = "{model}"
page_tokens = {page_tokens}
shards = {ranks}
hicache = {{ tp_size = {ranks}, naming = "{naming}" }}
[[models.components]]
name = "kv"
bytes = {kv_bytes}
"""
_STATE = """
[[models.components]]
name = "mamba"
bytes = {state_bytes}
covers = "tail"
window = 1
slots = {state_slots}
"""


def set_up(
    home: Path,
    kv_bytes: int,
    state_bytes: int = 0,
    *,
    page_tokens: int = PAGE_TOKENS,
    ranks: int = 1,
    state_slots: int = 20,
    fills: bool = False,
) -> Path:
    """Make an empty SGLang directory below `home` and return a service's configuration for it.

    With `fills` the service takes memory to fill.
    """
    (home / "l3").mkdir(exist_ok=True)
    text = _CONFIG + (_STATE if state_bytes else "")
    naming = "old" if VERSION == "0.5.13" else "new"
    sizes = {"kv_bytes": kv_bytes, "state_bytes": state_bytes, "state_slots": state_slots, "page_tokens": page_tokens}
    regions = f"{home}/r" if fills else ""
    (home / "forestage.toml").write_text(
        text.format(home=home, regions=regions, model=MODEL, naming=naming, ranks=ranks, **sizes)
    )
    return home / "forestage.toml"


def extra_config(home: Path, **more: Any) -> dict[str, Any]:
    """Return what a user writes behind `--hicache-storage-backend-extra-config`."""
    names = {"module_path": "forestage_client.integrations.sglang", "class_name": "ForestageStorage"}
    return {"backend_name": "forestage", **names, "interface_v1": 1, "url": f"unix:{home}/s", **more}


def _config(extra: dict[str, Any] | None, rank: int, ranks: int) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=ranks,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=MODEL,
        extra_config=extra,
    )


def make_backend(home: Path, rank: int = 0, ranks: int = 1, **more: Any) -> Any:
    """Let SGLang's factory load and make the adapter."""
    return StorageBackendFactory.create_backend("dynamic", _config(extra_config(home, **more), rank, ranks), None)


def file_backend(home: Path, rank: int = 0, ranks: int = 1) -> HiCacheFile:
    """Return SGLang's file backend for the directory of the service's L3."""
    os.environ.pop("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", None)
    return HiCacheFile(_config(None, rank, ranks), file_path=str(home / "l3"))


def hashes_of(tokens: list[int], page_tokens: int = PAGE_TOKENS) -> list[str]:
    """Return the page hashes of a prompt, as SGLang makes them."""
    if VERSION == "0.5.13":
        from sglang.srt.mem_cache.utils import get_hash_str

        hashes: list[str] = []
        for at in range(0, len(tokens), page_tokens):
            hashes.append(get_hash_str(tokens[at : at + page_tokens], hashes[-1] if hashes else None))
        return hashes
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    return list(get_storage_hash_str(array("q", tokens), None, page_size=page_tokens))


def slots_of(pages: list[int], page_tokens: int = PAGE_TOKENS) -> torch.Tensor:
    """Return the slots of a host pool's pages, as SGLang passes them."""
    return torch.tensor([page * page_tokens + token for page in pages for token in range(page_tokens)])
