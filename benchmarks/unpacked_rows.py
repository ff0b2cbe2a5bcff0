"""Training speed and peak memory on rows of one document: against a bare loop, and against transformers' Trainer.

The bare loop shows the price of the framework: it runs our own model and loss on batches that lie ready.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.comparison import compare
from benchmarks.report import Gate, Report
from benchmarks.training import Training
from benchmarks.turns import Contender, Schedule

SHARE_OF_BARE_LOOP = 0.97
TIMES_TRANSFORMERS = 1.15

OURS = Contender(name="HyperTrainer", module="benchmarks.contenders.hyper_trainer")
BARE_LOOP = Contender(name="bare loop", module="benchmarks.contenders.bare_loop")
TRANSFORMERS = Contender(name="transformers", module="benchmarks.contenders.transformers_trainer")


def measure(folder: Path, *, quick: bool) -> Report:
    """All three in turns, for each dtype."""
    gates: list[Gate] = []
    for dtype in ("float32", "bfloat16"):
        training = Training(folder=str(folder / f"unpacked_{dtype}"), dtype=dtype, rows=8, row_tokens=256)
        schedule = Schedule(rounds=1, steps=1, warmup_steps=1) if quick else Schedule(steps=10)
        found = compare(training, (OURS, BARE_LOOP, TRANSFORMERS), schedule)
        bounds = ((BARE_LOOP, SHARE_OF_BARE_LOOP), (TRANSFORMERS, TIMES_TRANSFORMERS))
        gates += found.gates(f"unpacked, {dtype}", OURS, bounds)
    return Report("unpacked_rows", gates, (f"{training.rows} rows of {training.row_tokens} tokens a step",))
