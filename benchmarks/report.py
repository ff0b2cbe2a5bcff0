"""What a benchmark found: samples, their medians, and whether these keep what was promised."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

UNITS: dict[str, Callable[[float], str]] = {
    "tokens/s": lambda value: f"{value:,.0f} tokens/s",
    "tokens/CPU-s": lambda value: f"{value:,.0f} tokens/CPU-s",
    "samples/CPU-s": lambda value: f"{value:,.0f} samples/CPU-s",
    "documents/CPU-s": lambda value: f"{value:,.0f} documents/CPU-s",
    "bytes/s": lambda value: f"{value / 1e6:,.0f} MB/s",
    "bytes": lambda value: f"{value / 2**20:,.0f} MiB",
    "seconds": lambda value: f"{value:.2f} s",
    "loss": lambda value: f"{value:.3f}",
}
"""How a value of each unit is printed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One figure, and the bound that it must keep.

    The figure is the ratio of the medians of `ours` and `theirs`; without `theirs`, the median of `ours` itself.
    """

    what: str
    unit: Literal["tokens/s", "tokens/CPU-s", "samples/CPU-s", "documents/CPU-s", "bytes/s", "bytes", "seconds", "loss"]
    ours: Sequence[float]
    theirs: Sequence[float] = ()
    relation: Literal[">=", "<="]
    bound: float

    @property
    def figure(self) -> float:
        """What is held against `bound`."""
        return median(self.ours) / median(self.theirs) if self.theirs else median(self.ours)

    @property
    def is_kept(self) -> bool:
        """Whether the figure keeps the bound; a figure that is not a number keeps none."""
        return self.figure >= self.bound if self.relation == ">=" else self.figure <= self.bound

    def row(self) -> list[str]:
        """The cells of its line in the table."""
        show = UNITS[self.unit]
        return [
            self.what,
            show(median(self.ours)),
            show(median(self.theirs)) if self.theirs else "",
            f"{self.figure:.3f}" if self.theirs else "",
            f"{self.relation} {self.bound:g}",
            "PASS" if self.is_kept else "FAIL",
        ]

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "what": self.what,
            "unit": self.unit,
            "ours": list(self.ours),
            "theirs": list(self.theirs),
            "figure": self.figure,
            "gate": f"{self.relation} {self.bound:g}",
            "is_kept": self.is_kept,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """The gates of one benchmark, and what a reader must know to judge them."""

    name: str
    gates: Sequence[Gate]
    notes: Sequence[str] = ()


def markdown(reports: Sequence[Report]) -> str:
    """One table of all gates, and the notes below it."""
    head = ["measured", "ours", "theirs", "ratio", "gate", ""]
    rows = [head, ["---", "---:", "---:", "---:", "---:", "---"], *(gate.row() for r in reports for gate in r.gates)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    notes = [f"- {report.name}: {note}" for report in reports for note in report.notes]
    return "\n".join([*lines, "", *notes])


def write_json(reports: Sequence[Report], path: Path, **environment: Any) -> None:
    """Writes every sample, with what is said of the machine in `environment`."""
    content = {
        **environment,
        "benchmarks": {r.name: {"notes": list(r.notes), "gates": [g.as_dict() for g in r.gates]} for r in reports},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
