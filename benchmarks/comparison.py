"""Contenders that train the same thing: tokens per second and peak memory of each."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from benchmarks.report import Gate
from benchmarks.training import Training, prepare
from benchmarks.turns import Contender, Schedule, interleave


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of one training."""

    documents_per_row: float
    tokens_per_second: dict[str, list[float]]
    """Of each turn, by contender."""
    peak_bytes: dict[str, int]
    """Largest resident size of each contender's process."""

    def gates(self, what: str, ours: Contender, bounds: Sequence[tuple[Contender, float]]) -> list[Gate]:
        """For each other contender: our speed is at least so many times its speed, our memory no more than its."""
        return [
            gate
            for other, times in bounds
            for gate in (
                Gate(
                    what=f"{what}: {ours.name} / {other.name}",
                    unit="tokens/s",
                    ours=self.tokens_per_second[ours.name],
                    theirs=self.tokens_per_second[other.name],
                    relation=">=",
                    bound=times,
                ),
                Gate(
                    what=f"{what}, peak memory: {ours.name} / {other.name}",
                    unit="bytes",
                    ours=[self.peak_bytes[ours.name]],
                    theirs=[self.peak_bytes[other.name]],
                    relation="<=",
                    bound=1,
                ),
            )
        ]


def compare(training: Training, contenders: Sequence[Contender], schedule: Schedule) -> Comparison:
    """Prepares the inputs and lets all contenders train on them in turns."""
    folder = Path(training.folder)
    shutil.rmtree(folder, ignore_errors=True)
    # In a process of its own: this one stays small, and what torch takes here is not there when contenders run.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        documents_per_row = alone.submit(prepare, training, schedule.total_steps).result()
    results = interleave(contenders, training, schedule, logs=folder)
    tokens = schedule.steps * training.rows * training.row_tokens
    return Comparison(
        documents_per_row,
        {name: [tokens / seconds for seconds in result.seconds] for name, result in results.items()},
        {name: result.peak_bytes for name, result in results.items()},
    )
