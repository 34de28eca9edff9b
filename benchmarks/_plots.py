"""Plots of benchmark tables, where matplotlib is there; it is not among the dependencies."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["plot_lines"]


def plot_lines(path: Path, title: str, ticks: Sequence[str], lines: Mapping[str, Sequence[float]], below: str) -> bool:
    """Draw one line a name over evenly spaced ticks; without matplotlib, say so on stderr and return False."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError:
        print(f"no {path}: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return False
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), dpi=75)
    for number, (name, values) in enumerate(lines.items()):
        axes.plot(ticks, values, label=name, marker="os^vDx*P"[number % 8], markersize=4, linewidth=1.2)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(below)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True
