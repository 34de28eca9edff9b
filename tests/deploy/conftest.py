"""The rendered manifests, each variant once."""

from pathlib import Path

import pytest

from deploy.rendering import VARIANTS, Manifests, render_variant


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deploy")


@pytest.fixture(params=VARIANTS)
def manifests(request: pytest.FixtureRequest, scratch: Path) -> Manifests:
    """Every variant in turn."""
    return render_variant(str(request.param), scratch)
