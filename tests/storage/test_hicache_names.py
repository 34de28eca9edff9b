"""File names of SGLang's file backend, as its two versions were seen to write them."""

from dataclasses import replace

import pytest

from forestage.core.layout import Component, Covers, HicacheNaming, ModelLayout
from forestage.storage.hicache_names import expected_shards, file_names, name_endings

KEY = bytes(range(32))
HASH = KEY.hex()
NEW, OLD = "new", "old"


def model(naming: HicacheNaming, component: str = "kv") -> ModelLayout:
    covers = Covers.EVERY_PAGE if component == "kv" else Covers.TAIL
    shards = expected_shards(naming, component)
    return ModelLayout("configured", 64, (Component(component, 4096, shards, covers),), shards=shards, hicache=naming)


def names(naming: HicacheNaming, component: str = "kv") -> tuple[str, ...]:
    return file_names(model(naming, component), 0, KEY)


@pytest.mark.parametrize("version", [NEW, OLD])
@pytest.mark.parametrize(
    ("naming", "component", "shard", "ending"),
    [
        (HicacheNaming("org/Model-7B", tp_size=2), "kv", 0, "_org-Model-7B_0_2.bin"),
        (HicacheNaming("org/Model-7B", tp_size=2), "kv", 1, "_org-Model-7B_1_2.bin"),
        (HicacheNaming("org/Model-7B", tp_size=2), "mamba", 0, ".mamba_org-Model-7B_0_2.bin"),
        (HicacheNaming("org/Model-7B", tp_size=2), "indexer", 1, ".indexer_org-Model-7B_1_2.bin"),
        (HicacheNaming("org/Model-7B", tp_size=8, mla=True), "kv", 0, "_org-Model-7B.bin"),
        (HicacheNaming("org/Model-7B", tp_size=8, mla=True), "indexer", 0, ".indexer_org-Model-7B.bin"),
        (HicacheNaming("org/Model-7B", tp_size=2, pp_size=2), "kv", 2, "_org-Model-7B_0_2_2_1.bin"),
        (HicacheNaming("org/Model-7B", tp_size=2, pp_size=2), "kv", 1, "_org-Model-7B_1_2_2_0.bin"),
        (HicacheNaming("org/Model-7B", tp_size=2, pp_size=2, mla=True), "kv", 1, "_org-Model-7B_2_1.bin"),
        (HicacheNaming("", tp_size=2), "kv", 0, "__0_2.bin"),
        (HicacheNaming("", mla=True), "kv", 0, "_.bin"),
        (HicacheNaming("a/b/c"), "kv", 0, "_a-b-c_0_1.bin"),
    ],
)
def test_names_that_both_versions_share(
    version: str, naming: HicacheNaming, component: str, shard: int, ending: str
) -> None:
    assert names(replace(naming, naming=version), component)[shard] == HASH + ending


@pytest.mark.parametrize(
    ("naming", "component", "shard", "ending"),
    [
        # A state is split over the tensor ranks even where the KV is replicated; old had not learnt that.
        (HicacheNaming("m", tp_size=8, mla=True, naming=NEW), "mamba", 5, ".mamba_m_5_8.bin"),
        (HicacheNaming("m", tp_size=8, mla=True, naming=OLD), "mamba", 0, ".mamba_m.bin"),
        (HicacheNaming("m", tp_size=2, pp_size=2, mla=True, naming=NEW), "mamba", 3, ".mamba_m_1_2_2_1.bin"),
        (HicacheNaming("m", tp_size=2, pp_size=2, mla=True, naming=OLD), "mamba", 1, ".mamba_m_2_1.bin"),
        # Context ranks exist in new only.
        (HicacheNaming("m", tp_size=2, cp_size=2, naming=NEW), "kv", 2, "_m_0_2_cp1_2.bin"),
        (HicacheNaming("m", tp_size=2, cp_size=2, naming=NEW), "kv", 1, "_m_1_2_cp0_2.bin"),
        (HicacheNaming("m", tp_size=2, pp_size=2, cp_size=2, naming=NEW), "kv", 6, "_m_0_2_2_1_cp1_2.bin"),
        (HicacheNaming("m", tp_size=4, cp_size=2, mla=True, naming=NEW), "kv", 1, "_m_cp1_2.bin"),
        (HicacheNaming("m", tp_size=4, pp_size=2, cp_size=3, mla=True, naming=NEW), "kv", 5, "_m_2_1_cp2_3.bin"),
        (HicacheNaming("m", tp_size=2, cp_size=2, naming=OLD), "kv", 1, "_m_1_2.bin"),
    ],
)
def test_names_that_differ(naming: HicacheNaming, component: str, shard: int, ending: str) -> None:
    assert names(naming, component)[shard] == HASH + ending


@pytest.mark.parametrize(
    ("naming", "component", "shards"),
    [
        (HicacheNaming("m"), "kv", 1),
        (HicacheNaming("m", tp_size=2, pp_size=3, cp_size=4), "kv", 24),
        (HicacheNaming("m", tp_size=2, pp_size=3, cp_size=4, naming=OLD), "kv", 6),
        (HicacheNaming("m", tp_size=2, pp_size=3, cp_size=4, mla=True), "kv", 12),
        (HicacheNaming("m", tp_size=2, pp_size=3, cp_size=4, mla=True), "mamba", 24),
        (HicacheNaming("m", tp_size=2, pp_size=3, cp_size=4, mla=True, naming=OLD), "mamba", 3),
    ],
)
def test_a_page_has_as_many_files_as_expected_and_none_twice(
    naming: HicacheNaming, component: str, shards: int
) -> None:
    assert expected_shards(naming, component) == shards
    assert len(set(names(naming, component))) == shards


def test_a_model_without_naming_has_the_contracts() -> None:
    component = Component("kv", 4096, shards=2)
    bare = ModelLayout("acme/m", 64, (component,), shards=2)
    assert file_names(bare, 0, KEY) == (f"{HASH}_acme-m_0_2.bin", f"{HASH}_acme-m_1_2.bin")


def test_other_numbers_of_shards_are_refused() -> None:
    two = ModelLayout("m", 64, (Component("kv", 4096, shards=2),), shards=2, hicache=HicacheNaming("m", tp_size=4))
    with pytest.raises(ValueError, match="kv: 2 shards configured, but 4 files"):
        name_endings(two, 0)


@pytest.mark.parametrize("component", ["../kv", "a\0b"])
def test_names_that_leave_the_directory_are_refused(component: str) -> None:
    with pytest.raises(ValueError, match="cannot end a file name"):
        names(HicacheNaming("m"), component)
