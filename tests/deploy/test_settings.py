"""The settings that a sidecar gets from manifests and compose are ones the service takes, and fit what is around it."""

from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import pytest
import yaml

from deploy.places import DEPLOY
from deploy.rendering import Manifests, engine_options, render_variant
from forestage.cli.main import main
from forestage.config import Config, load
from forestage.config.quantities import parse_bytes

POD_IP = "10.1.2.3"
REDIS_URL = "rediss://forestage:secret@redis.example:6379/0?ssl_ca_certs=/etc/forestage-redis/ca.crt"


def _environment(manifests: Manifests) -> dict[str, str]:
    """Return what the kubelet would make of the sidecar's `env`."""
    found = {}
    for variable in manifests.sidecar["env"]:
        match variable:
            case {"value": str(text)}:
                found[variable["name"]] = text
            case {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}:
                found[variable["name"]] = POD_IP
            case {"valueFrom": {"secretKeyRef": {"name": "forestage-redis", "key": "url"}}}:
                found[variable["name"]] = REDIS_URL
            case {"valueFrom": {"resourceFieldRef": {"resource": str(resource)}}}:
                where, _, name = resource.partition(".")
                found[variable["name"]] = str(parse_bytes(manifests.sidecar["resources"][where][name]))
            case _:
                raise AssertionError(variable)
    return found


def _load(manifests: Manifests, folder: Path) -> Config:
    path = folder / "forestage.toml"
    path.write_text(manifests.config())
    return load(str(path), _environment(manifests))


def test_the_service_takes_them(manifests: Manifests, tmp_path: Path) -> None:
    config = _load(manifests, tmp_path)
    mounts = manifests.mounts(manifests.sidecar)
    assert config.server.host == POD_IP
    assert [config.server.port] == [port["containerPort"] for port in manifests.sidecar["ports"]]
    assert str(PurePosixPath(config.pool.path).parent) in mounts
    assert str(PurePosixPath(config.server.uds).parent) in mounts
    in_huge_pages = manifests.volume("forestage-pool")["emptyDir"]["medium"] != "Memory"
    assert (config.pool.hugepages == "on") == in_huge_pages
    if manifests.of_kind("PersistentVolumeClaim"):  # the only one that writes to L3 is the sidecar
        assert config.storage.kind == "file"
        assert config.storage.file.root not in manifests.mounts(manifests.engine)
        assert "readOnly" not in mounts[config.storage.file.root]


def test_the_command_is_one(manifests: Manifests, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[str, float, str]] = []

    def serve(path: str, grace_s: float, log_level: str, _: str) -> int:
        served.append((path, grace_s, log_level))
        return 0

    monkeypatch.setattr("forestage.cli.serve.serve", serve)
    arguments = manifests.sidecar["args"]
    assert main(arguments) == 0
    ((path, grace, _),) = served
    mount = manifests.mounts(manifests.sidecar)[str(PurePosixPath(path).parent)]
    assert mount["name"] == "forestage-config"
    assert PurePosixPath(path).name == "forestage.toml"
    assert grace == 10


@pytest.mark.parametrize(("name", "option"), [("sglang", "--page-size"), ("vllm", "--block-size")])
def test_the_engine_cuts_pages_alike(name: str, option: str, scratch: Path, tmp_path: Path) -> None:
    manifests = render_variant(name, scratch)
    options = engine_options(manifests.engine)
    (model,) = _load(manifests, tmp_path).layouts()
    assert model.page_tokens % int(options[option]) == 0
    assert options["--served-model-name"] == model.name
    (kv,) = model.components
    # K and V, layers, tokens, KV heads, head size, bytes of bfloat16: those of Qwen3-8B
    assert kv.bytes == 2 * 36 * model.page_tokens * 8 * 128 * 2
    if name == "sglang":
        assert options["--page-size"] == str(model.page_tokens)
        assert options["--hicache-mem-layout"] == model.layout


def test_redis_comes_from_the_secret(scratch: Path, tmp_path: Path) -> None:
    manifests = render_variant("vllm", scratch)
    config = _load(manifests, tmp_path)
    assert config.storage.kind == "redis"
    assert config.storage.redis.url == REDIS_URL
    assert "/etc/forestage-redis" in manifests.mounts(manifests.sidecar)
    text = (DEPLOY / "components" / "redis" / "kustomization.yaml").read_text()
    assert REDIS_URL.replace("secret", "PASSWORD") in text  # what users are told to put into it
    assert REDIS_URL not in str(manifests.documents)


def test_compose() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    service = compose["services"]["forestage"]
    config = load(str(DEPLOY / "compose" / "forestage.toml"), service["environment"])
    volumes = dict(reversed(volume.split(":")[:2]) for volume in service["volumes"])
    assert volumes[str(PurePosixPath(config.pool.path).parent)] == "pool"
    options = dict(part.split("=") for part in compose["volumes"]["pool"]["driver_opts"]["o"].split(","))
    assert _docker_bytes(options["size"]) == config.pool.bytes
    assert _docker_bytes(service["mem_limit"]) == config.pool.bytes + (1 << 30)
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    for other in compose["services"].values():
        for volume in other["volumes"]:
            source = volume.partition(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).exists(), source
        assert all(port.startswith("127.0.0.1:") for port in other.get("ports", ()))


def test_redis_users_are_those_of_the_urls() -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["forestage"]
    url = urlsplit(service["environment"]["FORESTAGE_STORAGE__REDIS__URL"])
    trial = (DEPLOY / "compose" / "users.acl").read_text()
    assert f"user {url.username} on >{url.password} " in trial
    shipped = (DEPLOY / "components" / "redis" / "users.acl").read_text()
    assert trial == shipped.replace("PASSWORD", str(url.password))
    assert f"user {urlsplit(REDIS_URL).username} on " in shipped


def _docker_bytes(text: str) -> int:
    """Read a size as Docker and the kernel write it: their g is 1024 m."""
    return parse_bytes(f"{text[:-1]}{text[-1].upper()}i")
