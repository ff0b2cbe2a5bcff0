"""metrics.jsonl: one line of JSON a step."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from hyper_parallel.components.metrics.record import StepMetrics
from hyper_parallel.components.metrics.sink import MetricsSink


class JsonLines(MetricsSink):
    """Writes each step as one line, in full precision; numbers that are not finite become null.

    A line is handed to the system when it is written, so a killed run loses none. Opening drops the lines after the
    resumed step, and one that was torn by a crash: each step stands once. A fresh run starts the file anew.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsSink.Config):
        """Name of the file."""

        filename: str = "metrics.jsonl"
        """File in the dump folder."""

    def __init__(self, config: Config, *, dump_folder: str, training_steps: int) -> None:
        super().__init__(config, dump_folder=dump_folder, training_steps=training_steps)
        self.path = Path(dump_folder) / config.filename

    def open(self, last_step: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            os.truncate(self.path, _bytes_up_to(self.path, last_step))
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, record: StepMetrics) -> None:
        numbers = {k: v if v is not None and math.isfinite(v) else None for k, v in record.as_dict().items()}
        self._file.write(json.dumps(numbers, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _bytes_up_to(path: Path, last_step: int) -> int:
    """Length of the beginning of the file that holds whole lines of steps up to `last_step` only."""
    length = 0
    with path.open("rb") as file:
        for line in file:
            try:
                step = json.loads(line)["step"]
            except (ValueError, TypeError, KeyError):
                break
            if not line.endswith(b"\n") or step > last_step:
                break
            length += len(line)
    return length
