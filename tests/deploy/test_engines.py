"""The overlays start their engines as the guides say, with settings that the adapters take."""

import importlib.util
import json
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.places import DEPLOY, DOCS, ROOT, tool
from deploy.rendering import Manifests, engine_options, options_of, render_variant
from forestage_client.integrations._sglang_settings import Settings

EXTRA = "--hicache-storage-backend-extra-config"
TRANSFER = "--kv-transfer-config"
ENGINE_DOCKERFILE = DEPLOY / "engine.Dockerfile"


def _of_sglang_guide() -> dict[str, str]:
    text = (DOCS / "sglang.md").read_text()
    _, _, command = text.partition("python -m sglang.launch_server ")
    return options_of(shlex.split(command.partition("\n\n")[0]))


def _of_vllm_guide() -> dict[str, Any]:
    (block,) = re.findall(r"^```json\n(.*?)^```$", (DOCS / "vllm.md").read_text(), re.MULTILINE | re.DOTALL)
    config: dict[str, Any] = json.loads(block)
    return config


def test_sglang_is_started_as_its_guide_says(scratch: Path) -> None:
    guide, overlay = _of_sglang_guide(), engine_options(render_variant("sglang", scratch).engine)
    assert json.loads(guide.pop(EXTRA)) == json.loads(overlay[EXTRA])
    assert guide == {name: overlay[name] for name in guide}


def test_vllm_is_started_as_its_guide_says(scratch: Path) -> None:
    manifests = render_variant("vllm", scratch)
    guide, overlay = _of_vllm_guide(), json.loads(engine_options(manifests.engine)[TRANSFER])
    (tier,) = overlay["kv_connector_extra_config"]["secondary_tiers"]
    (shown,) = guide["kv_connector_extra_config"]["secondary_tiers"]
    assert set(tier) == set(shown)
    # Where the guide has names of its own, the overlay has those of its pod.
    assert {name for name in tier if tier[name] != shown[name]} == {"model", "pool_path"}
    guide["kv_connector_extra_config"]["secondary_tiers"] = [tier]
    assert overlay == guide


def test_sglang_finds_the_backend_and_it_takes_the_settings(scratch: Path) -> None:
    manifests = render_variant("sglang", scratch)
    options = engine_options(manifests.engine)
    settings = json.loads(options[EXTRA])
    assert options["--hicache-storage-backend"] == "dynamic"
    assert settings["interface_v1"] == 1
    source = importlib.util.find_spec(settings["module_path"])
    assert source is not None
    assert source.origin is not None
    assert f"class {settings['class_name']}" in Path(source.origin).read_text()
    ranks = dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1) | dict.fromkeys(("tp_rank", "pp_rank"), 0)
    given = SimpleNamespace(extra_config=settings, attn_cp_rank=0, is_mla_model=False, **ranks)
    given.model_name = options["--served-model-name"]
    assert Settings.read(given).url == settings["url"]
    _check_socket(manifests, settings["url"])


def test_vllm_finds_the_tier_and_the_pod_has_what_it_names(scratch: Path) -> None:
    manifests = render_variant("vllm", scratch)
    options = engine_options(manifests.engine)
    config = json.loads(options[TRANSFER])
    extra = config["kv_connector_extra_config"]
    (tier,) = extra["secondary_tiers"]
    source = importlib.util.find_spec(tier["module_path"])
    assert source is not None
    assert source.origin is not None
    assert f"class {tier['type']}" in Path(source.origin).read_text()
    assert config["kv_load_failure_policy"] == "recompute"
    assert tier["model"] == options["--served-model-name"]
    environment = {variable["name"]: variable.get("value") for variable in manifests.sidecar["env"]}
    assert tier["pool_path"] == environment["FORESTAGE_POOL__PATH"]
    _check_socket(manifests, tier["url"])
    (page_tokens,) = re.findall(r"^page_tokens = (\d+)$", manifests.config(), re.MULTILINE)
    assert int(options["--block-size"]) * extra["blocks_per_chunk"] == int(page_tokens)
    memory = manifests.engine["resources"]["limits"]["memory"]
    assert int(memory.removesuffix("Gi")) << 30 >= extra["cpu_bytes_to_use"] + (48 << 30)


def _check_socket(manifests: Manifests, url: str) -> None:
    environment = {variable["name"]: variable.get("value") for variable in manifests.sidecar["env"]}
    assert url == f"unix:{environment['FORESTAGE_SERVER__UDS']}"


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_the_images_are_those_that_are_built(name: str, scratch: Path) -> None:
    image = render_variant(name, scratch).engine["image"]
    text = ENGINE_DOCKERFILE.read_text()
    (base,) = re.findall(rf"-t {re.escape(image)} --build-arg BASE=(\S+) \.", text)
    assert base.rpartition(":")[2] == image.rpartition(":")[2]


def test_the_engine_dockerfile() -> None:
    done = subprocess.run([tool("hadolint"), str(ENGINE_DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    for line in re.findall(r"^COPY (.+) \S+$", ENGINE_DOCKERFILE.read_text(), re.MULTILINE):
        assert set(line.split()) <= {f"./{name}" for name in sent} | sent
