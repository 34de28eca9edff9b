"""Where the engines lie that `make engines-sglang` and `make engines-vllm` fetch."""

import os
from pathlib import Path

import pytest

__all__ = ["ENGINES", "engine_or_skip"]

ENGINES = Path(os.environ.get("FORESTAGE_ENGINES", Path(__file__).parents[2] / "build" / "engines"))


def engine_or_skip(name: str, version: str) -> Path:
    """Return the folder of an engine's unpacked wheel; without it the test is skipped and says how to get it.

    It fails instead where $FORESTAGE_ENGINES_FETCHED, names between blanks, has the engine: then its tests are to run.
    """
    root = ENGINES / f"{name}-{version}"
    if not root.exists():
        reason = f"{name} {version} is not there: make engines-{name} fetches it"
        if name in os.environ.get("FORESTAGE_ENGINES_FETCHED", "").split():
            pytest.fail(reason)
        pytest.skip(reason)
    return root
