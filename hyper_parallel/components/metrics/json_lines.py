"""metrics.jsonl: one line of JSON a step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hyper_parallel.components.metrics.record import StepMetrics
from hyper_parallel.components.metrics.sink import MetricsSink
from hyper_parallel.config.errors import Fault, RunError


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

        def writes_to(self) -> str:
            return self.filename

        def faults(self) -> Iterator[Fault]:
            if not self.filename.endswith(".jsonl"):
                # It is emptied where a run starts: it must be no other file of the run, config.json above all.
                fact = f"{self.filename!r} is no name for lines of JSON"
                yield Fault("filename", fact, "give one that ends in .jsonl")

    def __init__(self, config: Config, *, dump_folder: str, training_steps: int) -> None:
        super().__init__(config, dump_folder=dump_folder, training_steps=training_steps)
        self.path = Path(dump_folder) / config.filename

    def open(self, last_step: int) -> None:
        """As MetricsSink.

        Raises:
            RunError: the file cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                os.truncate(self.path, _bytes_up_to(self.path, last_step))
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise RunError(
                f"{self.path} cannot be written: {error.strerror}; remove it, or give another --dump_folder"
            ) from error

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
                counts = json.loads(line)["step"] <= last_step
            except (ValueError, TypeError, KeyError):
                break
            if not (counts and line.endswith(b"\n")):
                break
            length += len(line)
    return length
