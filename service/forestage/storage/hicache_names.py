"""What SGLang's file backend calls the pages of a model: `{key}[.{component}]{suffix}.bin`, in one flat directory.

Law: one name a shard, in the order shard = (pp_rank * cp_size + cp_rank) * tp_size + tp_rank; where the name does not
tell tensor ranks apart (one copy for all of them) that part of the order drops out.

Rules of SGLang 0.5.23 ("new") and 0.5.13 ("old"):

- new: `_{model}_{tp_rank}_{tp_size}`, then `_{pp_size}_{pp_rank}` if there are several pipeline ranks (size before
  rank), then `_cp{cp_rank}_{cp_size}` if there are several context ranks. MLA drops the tensor part, except for
  `mamba`: a state is split over the ranks even where the attention's KV is replicated.
- old: knows no context ranks and drops the tensor part of every component of an MLA model.
"""

from forestage.core.layout import HicacheNaming, ModelLayout

__all__ = ["expected_shards", "file_names", "name_endings", "naming_of"]


def naming_of(model: ModelLayout) -> HicacheNaming:
    """Return the model's naming, or the default one: its own name, one tensor rank a shard, new."""
    return model.hicache or HicacheNaming(served_name=model.name, tp_size=model.shards)


def expected_shards(naming: HicacheNaming, component_name: str) -> int:
    """Return how many files hold one page of a component."""
    return len(_suffixes(naming, component_name))


def name_endings(model: ModelLayout, component_index: int) -> tuple[str, ...]:
    """Return what follows the hex key in the file names of a component, one a shard.

    Raises ValueError when the component has another number of shards than the naming has files, or when a name
    could not be one of a flat directory.
    """
    component = model.components[component_index]
    naming = naming_of(model)
    infix = "" if component.name == "kv" else f".{component.name}"
    endings = tuple(f"{infix}{suffix}.bin" for suffix in _suffixes(naming, component.name))
    if len(endings) != component.shards:
        raise ValueError(f"{component.name}: {component.shards} shards configured, but {len(endings)} files a page")
    if any("/" in ending or "\0" in ending for ending in endings):
        raise ValueError(f"{component.name}: {endings[0]!r} cannot end a file name")
    return endings


def file_names(model: ModelLayout, component_index: int, key: bytes) -> tuple[str, ...]:
    """Return the names of all files of one page, one a shard. Raises ValueError as `name_endings` does."""
    return tuple(key.hex() + ending for ending in name_endings(model, component_index))


def _suffixes(naming: HicacheNaming, component_name: str) -> tuple[str, ...]:
    served = naming.served_name.replace("/", "-")
    is_old = naming.naming == "old"
    one_copy = naming.mla and (is_old or component_name != "mamba")
    cp_size = 1 if is_old else naming.cp_size
    suffixes = []
    for pp_rank in range(naming.pp_size):
        for cp_rank in range(cp_size):
            for tp_rank in range(1 if one_copy else naming.tp_size):
                tensor = "" if one_copy else f"_{tp_rank}_{naming.tp_size}"
                pipeline = f"_{naming.pp_size}_{pp_rank}" if naming.pp_size > 1 else ""
                context = f"_cp{cp_rank}_{cp_size}" if cp_size > 1 else ""
                suffixes.append(f"_{served}{tensor}{pipeline}{context}")
    return tuple(suffixes)
