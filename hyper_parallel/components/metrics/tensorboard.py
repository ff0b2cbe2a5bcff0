"""TensorBoard event files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hyper_parallel.components.metrics.record import StepMetrics
from hyper_parallel.components.metrics.sink import PeriodicSink


class TensorBoard(PeriodicSink):
    """Writes each number as ``train/<name>``."""

    @dataclass(kw_only=True, slots=True)
    class Config(PeriodicSink.Config):
        """How often and where."""

        interval_steps: int = 1
        """Every this many steps, and at the first and the last."""
        folder: str = "tensorboard"
        """Where the event files lie, below dump_folder."""

        def writes_to(self) -> str:
            return self.folder

    config: Config

    def open(self, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().open(last_step)
        # purge_step hides what an earlier run wrote from that step on.
        self._writer = SummaryWriter(str(Path(self.dump_folder) / self.config.folder), purge_step=last_step + 1)

    def write(self, record: StepMetrics) -> None:
        if not self.is_due(record):
            return
        for name, value in record.as_dict().items():
            if name != "step" and value is not None:
                self._writer.add_scalar(f"train/{name}", value, record.step)

    def close(self) -> None:
        self._writer.close()
