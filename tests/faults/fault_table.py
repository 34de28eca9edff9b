"""The faults of Redis as a table: what the caller got, when, and how long healing took."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

from support.live_redis import Answer, LiveRedis

__all__ = ["FaultTable"]

_LIVENESS_MS = 3000.0  # a machine with other work pauses for a second now and then; a wedged loop never answers


@dataclass(frozen=True, slots=True)
class _Row:
    fault: str
    got: str
    reasons: str
    ms: str
    heal: str
    health: str


@dataclass
class FaultTable:
    """Rows in the order in which the tests ran."""

    rows: list[_Row] = field(default_factory=list)

    def add(self, fault: str, answer: Answer, live: LiveRedis, heal_ms: float | None = None) -> None:
        """Add a row, and check what holds in every one: the service stayed alive all along."""
        spans = sorted(live.health_ms)
        assert spans, "nobody asked for health"
        p99 = spans[int(len(spans) * 0.99)]
        assert p99 < _LIVENESS_MS, f"liveness took {p99:.0f} ms"
        pages = answer.job.pages
        reasons = ", ".join(f"{reason} {count}" for reason, count in answer.shortfall.items()) or "-"
        heal = "-" if heal_ms is None else f"{heal_ms:.0f}"
        got = f"{pages.ready} of {pages.requested}"
        self.rows.append(
            _Row(fault, got, reasons, f"{answer.ms:.0f}", heal, f"{statistics.median(spans):.1f}/{p99:.0f}")
        )

    def lines(self) -> Iterator[str]:
        """Yield the table as Markdown."""
        heads = ("fault", "got", "shortfall", "after ms", "healed ms", "/healthz p50/p99 ms")
        cells = [heads, *((r.fault, r.got, r.reasons, r.ms, r.heal, r.health) for r in self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
        for number, row in enumerate(cells):
            yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
            if number == 0:
                yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"
