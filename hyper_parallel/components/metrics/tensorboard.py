"""TensorBoard event files."""

from __future__ import annotations

from pathlib import Path

from hyper_parallel.components.metrics.record import StepMetrics
from hyper_parallel.components.metrics.sink import MetricsSink


class TensorBoard(MetricsSink):
    """Writes each number as ``train/<name>`` under ``<dump_folder>/tensorboard``."""

    def open(self, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what an earlier run wrote from that step on.
        self._writer = SummaryWriter(str(Path(self.dump_folder) / "tensorboard"), purge_step=last_step + 1)

    def write(self, record: StepMetrics) -> None:
        for name, value in record.as_dict().items():
            if name != "step" and value is not None:
                self._writer.add_scalar(f"train/{name}", value, record.step)

    def close(self) -> None:
        self._writer.close()
