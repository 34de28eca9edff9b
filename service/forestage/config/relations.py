"""What must hold between tables: names are unique, promises can be kept, the pool holds the layouts, ranks agree with
file names.

Law: each check looks only at tables that are sound by themselves, so one slip gives one mistake.
"""

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from forestage.config.mistakes import Key, key_text, shown
from forestage.config.models import ModelConfig
from forestage.config.schema import LeaseConfig, PoolConfig, WritesConfig
from forestage.config.tenants import TenantConfig
from forestage.core.geometry import GeometryError, lay_out
from forestage.core.layout import HicacheNaming
from forestage.core.tenants import MAX_TENANTS

__all__ = [
    "component_mistakes",
    "expected_shards",
    "lmcache_mistakes",
    "name_mistakes",
    "pool_mistakes",
    "reserve_mistakes",
    "shard_mistakes",
    "share_mistakes",
    "vllm_mistakes",
]

Mistake = tuple[Key, str]


def expected_shards(naming: HicacheNaming, component_name: str) -> int:
    """Return how many files SGLang writes for one page of a component: one a rank that the name tells apart.

    MLA keeps the same KV on every tensor rank and writes it once; 0.5.23 ("new") still writes one Mamba state a rank.
    """
    once = naming.mla and not (naming.naming == "new" and component_name == "mamba")
    return (1 if once else naming.tp_size) * naming.pp_size * naming.cp_size


def name_mistakes(tables: object, array: Key) -> Iterator[Mistake]:
    """Yield the names that an earlier table of the same array already has. `tables` may be anything."""
    first: dict[str, int] = {}
    for index, table in enumerate(tables if isinstance(tables, list | tuple) else ()):
        name = table.get("name") if isinstance(table, dict) else None
        if not isinstance(name, str):
            continue
        if name in first:
            yield (*array, index, "name"), f"{key_text((*array, first[name]))} is already called {shown(name)}"
        first.setdefault(name, index)


def component_mistakes(model: Any, key: Key) -> Iterator[Mistake]:
    """Yield what is wrong between the components of one model as the file has it, sound or not."""
    components = model.get("components") if isinstance(model, dict) else None
    yield from name_mistakes(components, (*key, "components"))
    if isinstance(components, list | tuple) and components:
        covers = [c.get("covers") if isinstance(c, dict) else None for c in components]
        if all(word == "tail" for word in covers):
            yield (*key, "components"), 'at least one must have covers = "every_page"'


def shard_mistakes(model: ModelConfig, key: Key) -> Iterator[Mistake]:
    """Yield the components whose shards differ from the files that SGLang's file backend writes for a page."""
    naming = model.hicache.rule()
    for index, component in enumerate(model.components):
        expected = expected_shards(naming, component.name)
        if component.shards != expected:
            ranks = f"tp_size {naming.tp_size}, pp_size {naming.pp_size}, cp_size {naming.cp_size}"
            form = f'mla {str(naming.mla).lower()}, naming "{naming.naming}"'
            yield (
                (*key, "components", index, "shards"),
                f"is {component.shards}, but {key_text((*key, 'hicache'))} makes it {expected} ({ranks}, {form})",
            )


def vllm_mistakes(model: ModelConfig, key: Key) -> Iterator[Mistake]:
    """Yield what keeps a model from being found in the directory of vLLM's fs tier."""
    if not model.vllm.folder:
        yield (
            (*key, "vllm", "folder"),
            'is required with storage.kind = "vllm-file": the name of the folder ending in _r0',
        )
    for index, component in enumerate(model.components):
        if component.shards != 1:
            where = (*key, "components", index, "shards")
            yield where, f"must be 1, got {component.shards}: vLLM writes the parts of all ranks into one file"


def lmcache_mistakes(model: ModelConfig, key: Key) -> Iterator[Mistake]:
    """Yield what keeps a model from being named as LMCache names it."""
    if model.lmcache.served_name is None and "@" in model.name:
        yield (*key, "lmcache", "served_name"), "is required where the model's name has an at sign"
    for index, component in enumerate(model.components):
        if component.shards > 255:
            where = (*key, "components", index, "shards")
            yield where, f"must be at most 255, which is what LMCache can name, got {component.shards}"


def pool_mistakes(pool: PoolConfig, models: Mapping[int, ModelConfig]) -> Iterator[Mistake]:
    """Yield that the pool is too small for one slot of everything, or for the slots asked for."""
    try:
        lay_out(tuple(model.model_layout() for model in models.values()), pool.bytes)
    except GeometryError as error:
        yield ("pool", "bytes"), str(error)


def share_mistakes(tenants: Mapping[int, TenantConfig]) -> Iterator[Mistake]:
    """Yield that there are too many tenants, or that more is promised to them than there is."""
    if len(tenants) > MAX_TENANTS:
        yield ("tenants",), f"at most {MAX_TENANTS} can be configured, got {len(tenants)}"
    promised = sum(Fraction(repr(tenant.min_share)) for tenant in tenants.values())
    if promised > 1:
        yield ("tenants",), f"min_share of all together must be at most 1, is {float(promised):.6g}"


def reserve_mistakes(
    pool: PoolConfig, lease: LeaseConfig, writes: WritesConfig, tenants: Iterable[TenantConfig]
) -> Iterator[Mistake]:
    """Yield that what is kept for writes is more than they may use, or leaves tenants less than they are promised."""
    pinned = Fraction(repr(lease.max_pinned_fraction))
    left = pinned * (1 - sum(Fraction(repr(tenant.min_share)) for tenant in tenants))
    usable = Fraction(repr(writes.max_dirty_fraction))
    # Too much promised is a mistake of the tenants' own.
    if left >= 0 and Fraction(repr(pool.write_reserve)) > min(left, usable):
        bounds = "which lease.max_pinned_fraction and the tenants' min_share leave"
        if usable <= left:
            bounds = "which is writes.max_dirty_fraction: writes cannot use more"
        most = float(min(left, usable))
        yield ("pool", "write_reserve"), f"must be at most {most:.6g}, {bounds}, got {pool.write_reserve:.6g}"
