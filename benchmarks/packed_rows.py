"""Training speed and peak memory on rows of many documents, against the two ways that transformers' Trainer has on CPU.

A row is attended to as a whole, across the borders of documents (what its own language modelling examples do), or the
position ids that restart with each document (what DataCollatorWithFlattening hands out) make a mask of documents. Ours
attends within documents.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.comparison import compare
from benchmarks.report import Gate, Report
from benchmarks.training import Training
from benchmarks.turns import Contender, Schedule

TIMES_TRANSFORMERS = 1.8

OURS = Contender(name="HyperTrainer", module="benchmarks.contenders.hyper_trainer")
WHOLE_ROWS = Contender(name="transformers, whole rows", module="benchmarks.contenders.transformers_trainer")
DOCUMENT_MASK = Contender(
    name="transformers, document mask",
    module="benchmarks.contenders.transformers_trainer",
    arguments={"positions": True},
)


def measure(folder: Path, *, quick: bool) -> Report:
    """All three in turns, for each dtype."""
    gates: list[Gate] = []
    for dtype in ("float32", "bfloat16"):
        training = Training(
            folder=str(folder / f"packed_{dtype}"), dtype=dtype, rows=1, row_tokens=4096, document_tokens=256
        )
        schedule = Schedule(rounds=1, steps=1, warmup_steps=1) if quick else Schedule(steps=3, warmup_steps=2)
        found = compare(training, (OURS, WHOLE_ROWS, DOCUMENT_MASK), schedule)
        bounds = ((WHOLE_ROWS, TIMES_TRANSFORMERS), (DOCUMENT_MASK, TIMES_TRANSFORMERS))
        gates += found.gates(f"packed, {dtype}", OURS, bounds)
    note = f"{training.rows} row of {training.row_tokens} tokens a step, {found.documents_per_row:.1f} documents in it"
    return Report("packed_rows", gates, (note,))
