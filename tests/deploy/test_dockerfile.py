"""The Dockerfile: clean by hadolint, what it promises by its text. `make check-deploy` builds and runs the image."""

import re
import subprocess

import yaml

from deploy.places import DEPLOY, DOCS, ROOT, tool
from forestage import __version__

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_hadolint() -> None:
    done = subprocess.run([tool("hadolint"), str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_would_find_something() -> None:
    bad = "FROM debian\nRUN cd /tmp && apt-get install python3\n"
    done = subprocess.run([tool("hadolint"), "-"], input=bad, capture_output=True, text=True, check=False)
    assert done.returncode == 1


def test_nothing_that_only_some_builders_know() -> None:
    assert "<<" not in DOCKERFILE
    assert "--link" not in DOCKERFILE
    assert "--mount" not in DOCKERFILE


def test_the_last_stage_runs_as_a_number() -> None:
    stage = DOCKERFILE.rpartition("\nFROM ")[2]
    assert "\nUSER 10001:10001\n" in stage
    assert "pip" not in stage
    assert 'ENTRYPOINT ["forestage"]' in stage


def test_what_is_copied_reaches_the_builder() -> None:
    """Everything else is left out by .dockerignore, secrets in the checkout included."""
    copied = [
        word for line in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE) for word in line.split()
    ]
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == set(copied)
    assert all((ROOT / name).exists() for name in copied)


def test_manifests_name_this_version() -> None:
    for overlay in ("sglang", "vllm"):
        images = yaml.safe_load((DEPLOY / "overlays" / overlay / "kustomization.yaml").read_text())["images"]
        (image,) = (image for image in images if image["name"] == "forestage")
        assert image == {"name": "forestage", "newName": "forestage", "newTag": __version__}
    pod = yaml.safe_load((DEPLOY / "components" / "sidecar" / "pod.yaml").read_text())
    (sidecar,) = pod["spec"]["template"]["spec"]["initContainers"]
    assert sidecar["image"] == f"forestage:{__version__}"
    assert f"forestage:{__version__}" in (DOCS / "operate.md").read_text()
