"""Manifests as `kubectl apply -k` would send them, and what tests ask of them."""

import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from deploy.places import DEPLOY, tool

__all__ = ["VARIANTS", "Document", "Manifests", "engine_options", "options_of", "render_variant"]

Document: TypeAlias = dict[str, Any]

_PLAIN = """
apiVersion: apps/v1
kind: {kind}
metadata:
  name: engine
  labels: {{forestage/inject: "true"}}
spec:
  {more}
  selector: {{matchLabels: {{app: engine}}}}
  template:
    metadata: {{labels: {{app: engine}}}}
    spec:
      initContainers: [{{name: weights, image: busybox}}]
      containers:
        - {{name: engine, image: engine, env: [{{name: A, value: b}}], volumeMounts: []}}
        - {{name: router, image: router}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: bystander}}
spec:
  selector: {{matchLabels: {{app: bystander}}}}
  template:
    metadata: {{labels: {{app: bystander}}}}
    spec: {{containers: [{{name: bystander, image: bystander}}]}}
"""


class Manifests:
    """The documents of one rendering."""

    def __init__(self, documents: list[Document]) -> None:
        """Take over parsed documents."""
        self.documents = documents

    def of_kind(self, *kinds: str) -> list[Document]:
        return [document for document in self.documents if document["kind"] in kinds]

    def only(self, *kinds: str) -> Document:
        """Return the one document of these kinds."""
        (document,) = self.of_kind(*kinds)
        return document

    @property
    def workload(self) -> Document:
        """The workload that has the sidecar."""
        (found,) = (d for d in self.of_kind("Deployment", "StatefulSet", "DaemonSet") if "labels" in d["metadata"])
        return found

    @property
    def pod(self) -> Document:
        """The workload's pod, as its template says."""
        pod: Document = self.workload["spec"]["template"]["spec"]
        return pod

    @property
    def sidecar(self) -> Document:
        (found,) = (container for container in self.pod["initContainers"] if container["name"] == "forestage")
        return dict(found)

    @property
    def engine(self) -> Document:
        return dict(self.pod["containers"][0])

    def volume(self, name: str) -> Document:
        (found,) = (volume for volume in self.pod["volumes"] if volume["name"] == name)
        return dict(found)

    def mounts(self, container: Document) -> dict[str, Document]:
        """Return the mounts of a container by path."""
        return {mount["mountPath"]: mount for mount in container["volumeMounts"]}

    def config(self) -> str:
        """Return the `forestage.toml` that the sidecar mounts."""
        name = self.volume("forestage-config")["configMap"]["name"]
        (found,) = (d for d in self.of_kind("ConfigMap") if d["metadata"]["name"] == name)
        return str(found["data"]["forestage.toml"])


def options_of(words: list[str]) -> dict[str, str]:
    """Return the options of a command line by name, whether a value stands behind `=` or is the next word."""
    options = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            name, _, value = word.partition("=")
            options[name] = value if "=" in word or following.startswith("--") else following
    return options


def engine_options(engine: Document) -> dict[str, str]:
    """Return the options that a container's engine is started with."""
    return options_of([*engine.get("command", ()), *engine.get("args", ())])


def _edit(path: Path, *changes: tuple[str, str]) -> None:
    text = path.read_text()
    for old, new in changes:
        assert old in text, f"{path} has no {old!r}"
        text = text.replace(old, new)
    path.write_text(text)


def _everything(name: str) -> Callable[[Path], Path]:
    """Return what takes in each component that an overlay's comments offer, as a user would."""

    def change(deploy: Path) -> Path:
        folder = deploy / "overlays" / name
        _edit(folder / "kustomization.yaml", ("  # - ../../", "  - ../../"), ("size.yaml", "size-hugepages.yaml"))
        return folder

    return change


def _plain(kind: str) -> Callable[[Path], Path]:
    """Return what puts the sidecar into a workload of another kind, between containers of its own."""

    def change(deploy: Path) -> Path:
        folder = deploy / "overlays" / "plain"
        folder.mkdir()
        shutil.copy(deploy / "overlays" / "vllm" / "forestage.toml", folder)
        (folder / "engine.yaml").write_text(
            _PLAIN.format(kind=kind, more="serviceName: engine" if kind == "StatefulSet" else "")
        )
        (folder / "kustomization.yaml").write_text(
            "resources: [../../base, engine.yaml]\ncomponents: [../../components/sidecar]\n"
            "configMapGenerator: [{name: forestage-config, files: [forestage.toml]}]\n"
        )
        return folder

    return change


#: What is rendered: the overlays as they are, with all components, and other kinds of workloads.
VARIANTS: dict[str, Callable[[Path], Path]] = {
    "sglang": lambda deploy: deploy / "overlays" / "sglang",
    "vllm": lambda deploy: deploy / "overlays" / "vllm",
    "sglang, all components": _everything("sglang"),
    "vllm, all components": _everything("vllm"),
    "StatefulSet": _plain("StatefulSet"),
    "DaemonSet": _plain("DaemonSet"),
}


@cache
def render_variant(name: str, scratch: Path) -> Manifests:
    """Render a variant from a copy below `scratch`, once a session."""
    copy = scratch / name.replace(", ", "-").replace(" ", "-")
    shutil.copytree(DEPLOY, copy)
    folder = VARIANTS[name](copy)
    done = subprocess.run([tool("kubectl"), "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return Manifests([document for document in yaml.safe_load_all(done.stdout) if document])
