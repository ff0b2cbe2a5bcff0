"""Log lines."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from hyper_parallel.components.metrics.record import RateWindow, StepMetrics
from hyper_parallel.components.metrics.sink import MetricsSink, due
from hyper_parallel.config.errors import Fault
from hyper_parallel.config.sections import at_least

logger = logging.getLogger(__name__)


class ConsoleLog(MetricsSink):
    """A log line every few steps, with rates over the steps since the line before."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsSink.Config):
        """How often."""

        interval_steps: int = 10
        """A line every this many steps, and at the first and the last."""

        def faults(self) -> Iterator[Fault]:
            yield from at_least(self, 1, "interval_steps")

    def __init__(self, config: Config, *, dump_folder: str, training_steps: int) -> None:
        super().__init__(config, dump_folder=dump_folder, training_steps=training_steps)
        self._interval_steps = config.interval_steps

    def open(self, last_step: int) -> None:
        self._first_step = last_step + 1
        self._window = RateWindow()

    def write(self, record: StepMetrics) -> None:
        self._window.add(record)
        if due(record, self._first_step, self._interval_steps, self.training_steps):
            self._window.close()
            logger.info(self._line(record))

    def _line(self, record: StepMetrics) -> str:
        parts = [
            f"step {record.step:>{len(str(self.training_steps))}}/{self.training_steps}",
            f"loss {record.loss:.4f}",
            f"grad_norm {record.grad_norm:.4f}",
            f"lr {record.lr:.3e}",
            f"{self._window.tokens_per_second:,.0f} tokens/s",
        ]
        if self._window.mfu is not None:
            parts.append(f"MFU {self._window.mfu:.1%}")
        if record.memory_bytes is not None:
            parts.append(f"memory {record.memory_bytes / 2**30:.2f} GiB")
        parts += [f"{name} {value:.4g}" for name, value in record.extra.items() if value is not None]
        return "  ".join(parts)
