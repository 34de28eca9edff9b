"""The example file loads, and docs/configuration.md has every key with its default."""

import re
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from config.toml_files import MINIMAL, load_text, mistakes_of
from forestage.config import (
    ComponentConfig,
    Config,
    HashConfig,
    HicacheConfig,
    LmcacheConfig,
    ModelConfig,
    TenantConfig,
    TokenConfig,
    VllmConfig,
    load,
    render,
)

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "forestage.toml"
DOCUMENT = (ROOT / "docs" / "configuration.md").read_text()

ROWS = dict(re.findall(r"^\| `([^`]+)` \| (.+?) \| .+ \|$", DOCUMENT.partition("## [server]")[2], re.MULTILINE))


def test_the_example_loads() -> None:
    config = load(str(EXAMPLE), {})
    assert [model.name for model in config.models] == ["demo"]
    assert config.pool.bytes == 32 << 20


def test_what_the_example_comments_out_loads_too() -> None:
    text = re.sub(r"^# (?=[\w-]+ = |\[)", "", EXAMPLE.read_text(), flags=re.MULTILINE)
    text = text.replace("token_file", "# token_file")
    config = load_text(text)
    assert "hicache" in config.storage.hicache_file.root
    assert config.storage.redis.url.startswith("rediss://")
    assert [component.name for component in config.models[0].components] == ["kv", "mamba"]
    assert config.prefetch.min_pages == 8


def test_the_longest_example_of_the_document_loads() -> None:
    text = DOCUMENT.partition("eight tensor ranks:\n")[2].partition("\n## ")[0]
    assert mistakes_of('[storage]\nkind = "hicache-file"\n' + text) == []


def test_the_mistakes_of_the_document_are_worded_so() -> None:
    text = "[server]\nprot = 1" + MINIMAL + '[[models.components]]\nname = "x"\nbytes = 1\nwindow = 3'
    lines = mistakes_of(text, {"FORESTAGE_POOL__BYTES": "lots"})
    assert len(lines) == 3
    for line in lines:
        assert f"    {line}\n" in DOCUMENT


def test_every_key_outside_models_is_documented_with_its_default() -> None:
    defaults = _flat(tomllib.loads(render(load_text(MINIMAL))), "")
    written = {key: tomllib.loads(f"x = {text.strip('`')}")["x"] for key, text in ROWS.items() if "[]" not in key}
    assert written == defaults


def test_every_key_of_a_model_and_of_a_tenant_is_documented() -> None:
    expected = {
        *_names(ModelConfig, "models[]."),
        *_names(ComponentConfig, "models[].components[]."),
        *_names(HicacheConfig, "models[].hicache."),
        *_names(VllmConfig, "models[].vllm."),
        *_names(LmcacheConfig, "models[].lmcache."),
        *_names(TenantConfig, "tenants[]."),
        *_names(TokenConfig, "tokens[]."),
        *_names(HashConfig, "models[].hash."),
    } - {"models[].components"}
    assert {key for key in ROWS if "[]" in key} == expected
    assert {key.partition(".")[0] for key in ROWS if "[]" not in key} == set(Config.model_fields) - {
        "models",
        "tenants",
        "tokens",
    }


def _names(kind: type[BaseModel], above: str) -> set[str]:
    return {above + name for name in kind.model_fields}


def _flat(table: dict[str, Any], above: str) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{above}{key}.")
        elif key != "models":
            flat[above + key] = value
    return flat
