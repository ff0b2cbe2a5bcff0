"""Log lines."""

from __future__ import annotations

import logging

from hyper_parallel.components.metrics.record import StepMetrics
from hyper_parallel.components.metrics.sink import PeriodicSink

logger = logging.getLogger(__name__)


class ConsoleLog(PeriodicSink):
    """A log line every few steps, with rates over the steps since the line before."""

    def write(self, record: StepMetrics) -> None:
        if self.is_due(record):
            logger.info(self._line(record))

    def _line(self, record: StepMetrics) -> str:
        parts = [
            f"step {record.step:>{len(str(self.training_steps))}}/{self.training_steps}",
            f"loss {record.loss:.4f}",
            f"grad_norm {record.grad_norm:.4f}",
            f"lr {record.lr:.3e}",
            f"{self.window.tokens_per_second:,.0f} tokens/s",
        ]
        if self.window.mfu is not None:
            parts.append(f"MFU {self.window.mfu:.1%}")
        if record.memory_bytes is not None:
            parts.append(f"memory {record.memory_bytes / 2**30:.2f} GiB")
        parts += [f"{name} {value:.4g}" for name, value in record.extra.items() if value is not None]
        return "  ".join(parts)
