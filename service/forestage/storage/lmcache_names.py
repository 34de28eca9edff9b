"""What LMCache calls the pages of a model: its fs adapter in one flat directory, its Redis adapters in Redis.

Law: one name a shard, in the order of the ranks; each is a beginning, the key in hex, and an ending.

Rules of LMCache 0.5.6 (its multi-process server): `{model}@0x{rank word}@{group}@{hash}[@{salt}].data`, with `-SEP-`
for each `/` of the model's name. The rank word packs world size and rank into a byte each, twice, since the server
counts all ranks as those of one host; it has 8 hex digits, the group as few as it needs. In Redis the slashes stay, and
neither the `0x` nor the `.data` is there: `{model}@{rank word}@{group}@{hash}[@{salt}]`.
"""

from forestage.core.layout import LmcacheNaming, ModelLayout

__all__ = ["MAX_WORLD", "file_marks", "naming_of", "rank_words", "redis_marks"]

MAX_WORLD = 255


def naming_of(model: ModelLayout) -> LmcacheNaming:
    """Return the model's naming, or the default one: its own name, no salt."""
    return model.lmcache or LmcacheNaming(model.name)


def rank_words(world_size: int) -> list[int]:
    """Return the rank word of each rank. Raises ValueError for more ranks than a byte can count."""
    if not 1 <= world_size <= MAX_WORLD:
        raise ValueError(f"{world_size} shards configured, but LMCache names 1 to {MAX_WORLD} ranks")
    return [world_size << 24 | rank << 16 | world_size << 8 | rank for rank in range(world_size)]


def file_marks(model: ModelLayout, component_index: int) -> list[tuple[str, str]]:
    """Return what stands before and behind the key in the names of files, one a shard. Raises ValueError."""
    naming = naming_of(model)
    name = naming.served_name.replace("/", "-SEP-")
    ending = f"@{naming.salt}.data" if naming.salt else ".data"
    words = rank_words(model.components[component_index].shards)
    return [(f"{name}@{word:#010x}@{component_index:x}@", ending) for word in words]


def redis_marks(model: ModelLayout, component_index: int) -> list[tuple[str, str]]:
    """Return what stands before and behind the key in names in Redis, one a shard. Raises ValueError."""
    naming = naming_of(model)
    ending = f"@{naming.salt}" if naming.salt else ""
    words = rank_words(model.components[component_index].shards)
    return [(f"{naming.served_name}@{word:08x}@{component_index:x}@", ending) for word in words]
