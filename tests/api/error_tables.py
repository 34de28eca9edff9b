"""The tables of docs/errors.md, for the tests that hold the service to them."""

import re
from pathlib import Path

__all__ = ["is_line", "table"]

_DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "errors.md"


def table(title: str) -> list[tuple[str, ...]]:
    """Return the rows below a heading, without code marks."""
    _, _, text = _DOCUMENT.read_text().partition(f"\n## {title}\n")
    rows = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [tuple(_plain(cell) for cell in row.strip("| ").split(" | ")) for row in rows[2:]]


def _plain(cell: str) -> str:
    cell = cell.strip()
    return cell[1:-1] if cell.startswith("`") and cell.endswith("`") and cell.count("`") == 2 else cell


def is_line(line: str, documented: str) -> bool:
    """Say whether a printed line is the documented one; `...` stands for anything."""
    pattern = ".*".join(map(re.escape, documented.split("...")))
    return re.fullmatch(pattern, line) is not None
