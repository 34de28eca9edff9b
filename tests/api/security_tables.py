"""The tables of docs/security.md, for the tests that hold the service to them."""

from pathlib import Path

__all__ = ["security_table"]

_DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "security.md"


def security_table(title: str, last_column: str) -> list[tuple[str, ...]]:
    """Return the rows of the table below a heading whose last column has this name, without code marks."""
    _, _, text = _DOCUMENT.read_text().partition(f"\n## {title}\n")
    section = text.partition("\n## ")[0]
    _, _, rest = section.partition(f"{last_column} |\n")
    assert rest, f"no table with the column {last_column} below {title}"
    rows = []
    for line in rest.splitlines()[1:]:
        if not line.startswith("|"):
            break
        rows.append(tuple(cell.strip().strip("`") for cell in line.strip("| ").split(" | ")))
    return rows
