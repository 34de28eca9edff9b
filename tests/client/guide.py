"""The examples of docs/client.md, to be run as they stand."""

from pathlib import Path
from typing import Any

__all__ = ["run_example"]

GUIDE = Path(__file__).parents[2] / "docs" / "client.md"


def run_example(containing: str) -> dict[str, Any]:
    """Run the one Python block that contains a text, and return the names it defines."""
    blocks = [block.partition("```")[0] for block in GUIDE.read_text().split("```python\n")[1:]]
    (source,) = [block for block in blocks if containing in block]
    names: dict[str, Any] = {}
    exec(compile(source, str(GUIDE), "exec"), names)
    return names
