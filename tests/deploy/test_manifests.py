"""What `kubectl apply -k` would send: valid for every Kubernetes it is for, and sound as a whole."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from deploy.rendering import Document, Manifests, render_variant
from forestage.config.quantities import parse_bytes
from forestage.pool.limits import HEADROOM_BYTES

#: The first with native sidecars by default, the first where they are final, and the newest known.
KUBERNETES = ("1.29", "1.33", "1.37")

#: What the custom resources may have, by the Prometheus operator's reference: its schemas let unknown keys pass.
KNOWN_KEYS: dict[str, dict[str, set[str]]] = {
    "PodMonitor": {
        "spec": {"selector", "podMetricsEndpoints"},
        "spec.selector": {"matchLabels"},
        "spec.podMetricsEndpoints": {"port", "path", "interval", "scrapeTimeout", "relabelings"},
        "spec.podMetricsEndpoints.relabelings": {"targetLabel", "sourceLabels", "separator", "replacement", "action"},
    },
    "PrometheusRule": {
        "spec": {"groups"},
        "spec.groups": {"name", "rules"},
        "spec.groups.rules": {"alert", "expr", "for", "labels", "annotations"},
    },
}


@pytest.mark.parametrize("version", KUBERNETES)
def test_schemas(manifests: Manifests, version: str) -> None:
    kinds = {document["kind"] for document in manifests.documents}
    assert kinds >= {"Service", "NetworkPolicy", "ConfigMap"}
    for document in manifests.documents:
        if document["kind"] not in KNOWN_KEYS:
            kubernetes_validate.validate(document, version, strict=True)


def test_a_wrong_key_would_be_found(scratch: Path) -> None:
    document = render_variant("vllm", scratch).workload
    wrong = {**document, "spec": {**document["spec"], "replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES[0], strict=True)


def _check_keys(value: Any, path: str, known: dict[str, set[str]]) -> None:
    if isinstance(value, list):
        for item in value:
            _check_keys(item, path, known)
    elif isinstance(value, dict) and path in known:
        assert set(value) <= known[path], path
        for key, item in value.items():
            _check_keys(item, f"{path}.{key}", known)


def test_custom_resources_have_known_keys(scratch: Path) -> None:
    manifests = render_variant("vllm, all components", scratch)
    for kind, known in KNOWN_KEYS.items():
        document = manifests.only(kind)
        assert document["apiVersion"] == "monitoring.coreos.com/v1"
        assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
        _check_keys(document["spec"], "spec", known)


def test_the_monitor_finds_the_port(scratch: Path) -> None:
    manifests = render_variant("sglang, all components", scratch)
    monitor = manifests.only("PodMonitor")["spec"]
    labels = manifests.workload["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    containers = [*manifests.pod["initContainers"], *manifests.pod["containers"]]
    names = [port["name"] for container in containers for port in container.get("ports", ())]
    assert names.count(endpoint["port"]) == 1
    assert {r["targetLabel"]: r.get("replacement") for r in endpoint["relabelings"]}["job"] == "forestage"


def test_selectors_find_the_pod(manifests: Manifests) -> None:
    labels = manifests.workload["spec"]["template"]["metadata"]["labels"]
    service, policy = manifests.only("Service")["spec"], manifests.only("NetworkPolicy")["spec"]
    assert service["selector"].items() <= labels.items()
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert service["clusterIP"] == "None"
    assert not service["publishNotReadyAddresses"]
    (port,) = service["ports"]
    assert isinstance(port["targetPort"], int)  # by name it would not be found before 1.32


def test_the_policy_limits_one_port(manifests: Manifests) -> None:
    policy = manifests.only("NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    (port,) = (port["containerPort"] for port in manifests.sidecar["ports"])
    opened: set[int] = set()
    for rule in policy["ingress"]:
        ranges = [range(p["port"], p.get("endPort", p["port"]) + 1) for p in rule["ports"] if p["protocol"] == "TCP"]
        if "from" in rule:
            assert ranges == [range(port, port + 1)]
        else:
            opened.update(*ranges)
    assert opened == set(range(1, 65536)) - {port}


def test_the_sidecar_is_native_and_comes_first(manifests: Manifests) -> None:
    sidecar = manifests.sidecar
    assert sidecar["restartPolicy"] == "Always"
    assert (
        manifests.pod["initContainers"][0]["name"] == "forestage"
    )  # before downloads of weights: it is ready meanwhile
    assert manifests.pod["enableServiceLinks"] is False


def test_probes_ask_what_they_should(manifests: Manifests) -> None:
    sidecar = manifests.sidecar
    (port,) = (port["containerPort"] for port in sidecar["ports"])
    paths = {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    for name, path in paths.items():
        assert sidecar[name]["httpGet"] == {"path": path, "port": port}
    start = sidecar["startupProbe"]
    assert start["failureThreshold"] * start["periodSeconds"] >= 600  # a large pool takes minutes


def test_the_sidecar_passes_the_restricted_standard(manifests: Manifests) -> None:
    context = manifests.sidecar["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] == context["runAsGroup"] == 10001
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert context["readOnlyRootFilesystem"] is True
    assert "privileged" not in context
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(manifests.pod)
    assert all("hostPort" not in port for port in manifests.sidecar["ports"])
    kinds = {key for volume in manifests.pod["volumes"] for key in volume if key != "name"}
    assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}


def test_the_engine_can_open_the_pool(manifests: Manifests) -> None:
    ours, theirs = manifests.mounts(manifests.sidecar), manifests.mounts(manifests.engine)
    for path in ("/mnt/forestage", "/run/forestage"):
        assert theirs[path] == ours[path]
        assert "readOnly" not in ours[path]
    groups = manifests.pod["securityContext"]
    assert groups["supplementalGroups"] == [manifests.sidecar["securityContext"]["runAsGroup"]]
    in_huge_pages = manifests.volume("forestage-pool")["emptyDir"]["medium"] != "Memory"
    claims = {volume["name"] for volume in manifests.pod["volumes"] if "persistentVolumeClaim" in volume}
    writes_files = bool(claims & {mount["name"] for mount in ours.values()})
    # A huge page file system, or a volume for L3, lets only root in until the kubelet hands it to a group.
    assert (groups.get("fsGroup") == 10001) == (in_huge_pages or writes_files)


def _pool_bytes(manifests: Manifests) -> int:
    (variable,) = (item for item in manifests.sidecar["env"] if item["name"] == "FORESTAGE_POOL__BYTES")
    if "valueFrom" not in variable:
        return parse_bytes(variable["value"])
    assert "value" not in variable
    field = variable["valueFrom"]["resourceFieldRef"]
    assert field["containerName"] == "forestage"
    where, _, resource = field["resource"].partition(".")
    return parse_bytes(manifests.sidecar["resources"][where][resource])


def test_memory_follows_from_the_pool(manifests: Manifests) -> None:
    pool = _pool_bytes(manifests)
    resources, volume = manifests.sidecar["resources"], manifests.volume("forestage-pool")["emptyDir"]
    assert resources["requests"] == resources["limits"]  # class Guaranteed
    assert parse_bytes(volume["sizeLimit"]) == pool
    memory = parse_bytes(resources["limits"]["memory"])
    if volume["medium"] == "Memory":
        assert memory == pool + (1 << 30)
        assert memory - pool > HEADROOM_BYTES  # or the service refuses to start
        assert "hugepages-2Mi" not in resources["limits"]
    else:
        assert volume["medium"] == "HugePages-2Mi"
        assert parse_bytes(resources["limits"]["hugepages-2Mi"]) == pool
        assert pool % (2 << 20) == 0
        assert memory == 1 << 30


@pytest.mark.parametrize("name", ["sglang", "vllm", "sglang, all components"])
def test_engines_are_complete(name: str, scratch: Path) -> None:
    manifests = render_variant(name, scratch)
    engine = manifests.engine
    assert engine["resources"]["requests"] == engine["resources"]["limits"]
    assert "nvidia.com/gpu" in engine["resources"]["limits"]
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(engine)
    assert engine["securityContext"]["allowPrivilegeEscalation"] is False
    volumes = {volume["name"] for volume in manifests.pod["volumes"]}
    for container in (engine, manifests.sidecar):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    arguments = manifests.sidecar["args"]
    grace = int(arguments[arguments.index("--grace") + 1])
    assert manifests.pod["terminationGracePeriodSeconds"] >= 90 + grace
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in manifests.pod["volumes"]
        if len(volume) > 1 and "persistentVolumeClaim" in volume
    }
    assert claims == {document["metadata"]["name"] for document in manifests.of_kind("PersistentVolumeClaim")}


@pytest.mark.parametrize("kind", ["StatefulSet", "DaemonSet"])
def test_nothing_else_is_touched(kind: str, scratch: Path) -> None:
    manifests = render_variant(kind, scratch)
    assert manifests.workload["kind"] == kind
    assert [container["name"] for container in manifests.pod["containers"]] == ["engine", "router"]
    assert [container["name"] for container in manifests.pod["initContainers"]] == ["forestage", "weights"]
    assert manifests.engine["env"] == [{"name": "A", "value": "b"}]
    assert "volumeMounts" not in manifests.pod["containers"][1]
    (bystander,) = (d for d in manifests.of_kind("Deployment") if d["metadata"]["name"] == "bystander")
    template: Document = bystander["spec"]["template"]
    assert set(template["spec"]) == {"containers"}
    assert template["metadata"]["labels"] == {"app": "bystander"}
