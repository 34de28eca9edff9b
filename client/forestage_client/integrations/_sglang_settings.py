"""What `--hicache-storage-backend-extra-config` and SGLang's own settings say, checked and as values."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from forestage_client.integrations._host_room import RoomRule

__all__ = ["Rank", "Settings"]

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Rank:
    """Which part of each page a process of the engine has: shard (pp_rank * cp_size + cp_rank) * tp_size + tp_rank.

    With MLA the ranks of one tensor parallel group have the same KV, of which there is one shard for all of them.
    """

    index: int
    count: int
    tp_size: int = 1
    is_mla: bool = False

    @property
    def writers(self) -> int:
        """How many ranks SGLang lets write KV pages: all, or with MLA the first of each tensor parallel group."""
        return self.count // self.tp_size if self.is_mla else self.count

    def shard_of(self, shards: int) -> int | None:
        """Return which of a component's shards is this rank's; None when the model is laid out for other ranks."""
        if shards == self.count:
            return self.index
        return self.index // self.tp_size if shards == self.writers else None


@dataclass(frozen=True, slots=True)
class Settings:
    """How to reach the service and how long to wait for it, in milliseconds; `staging_bytes` bounds staged pages."""

    url: str
    model: str
    rank: Rank
    token: str | None = None
    tenant: str | None = None
    pool_path: str | None = None
    regions_uds: str | None = None
    query_ms: int = 1000
    read_ms: int = 2000
    read_ms_per_ki_token: int = 250
    write_ms: int = 5000
    host_room: RoomRule = "auto"
    staging_bytes: int = 256 * _MIB

    @classmethod
    def read(cls, storage_config: Any) -> "Settings":
        """Take what concerns Forestage from SGLang's HiCacheStorageConfig. Raises ValueError naming the key."""
        extra: Mapping[str, Any] = storage_config.extra_config or {}
        tp, pp, cp = storage_config.tp_size, storage_config.pp_size, storage_config.attn_cp_size
        if getattr(storage_config, "dcp_size", 1) > 1:
            raise ValueError("forestage: decode context parallelism (dcp_size > 1) is not supported")
        index = (storage_config.pp_rank * cp + storage_config.attn_cp_rank) * tp + storage_config.tp_rank
        rank = Rank(index, tp * pp * cp, tp, bool(storage_config.is_mla_model))
        model = _text(extra, "model") or storage_config.model_name
        if not model:
            raise ValueError("forestage: model must name a model of the service's configuration")
        rule = _text(extra, "host_room") or "auto"
        if rule not in get_args(RoomRule):
            raise ValueError(f"forestage: host_room must be one of {', '.join(get_args(RoomRule))}, not {rule!r}")
        token_file = _text(extra, "token_file")
        return cls(
            url=_text(extra, "url") or _text(extra, "endpoint") or "http://127.0.0.1:8470",
            model=model,
            rank=rank,
            token=None if token_file is None else Path(token_file).read_text(encoding="utf-8"),
            tenant=_text(extra, "tenant"),
            pool_path=_text(extra, "pool_path"),
            regions_uds=_text(extra, "regions_uds"),
            query_ms=_number(extra, "query_ms", 1000),
            read_ms=_number(extra, "read_ms", 2000),
            read_ms_per_ki_token=_number(extra, "read_ms_per_ki_token", 250),
            write_ms=_number(extra, "write_ms", 5000),
            host_room=cast("RoomRule", rule),
            staging_bytes=_number(extra, "staging_mib", 256) * _MIB,
        )

    def read_deadline_ms(self, tokens: int) -> int:
        """Return how long a read of so many tokens may take."""
        return self.read_ms + self.read_ms_per_ki_token * tokens // 1024


def _text(extra: Mapping[str, Any], key: str) -> str | None:
    value = extra.get(key)
    if value is not None and not (isinstance(value, str) and value):
        raise ValueError(f"forestage: {key} must be a text, not {value!r}")
    return value


def _number(extra: Mapping[str, Any], key: str, default: int) -> int:
    value = extra.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"forestage: {key} must be a whole number, not {value!r}")
    return value
