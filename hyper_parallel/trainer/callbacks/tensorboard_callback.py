"""TensorBoardCallback: TensorBoard event files."""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.components.metrics import MetricsSink, TensorBoard
from hyper_parallel.trainer.callbacks.sink_callback import SinkCallback


class TensorBoardCallback(SinkCallback):
    """Writes each number as ``train/<name>`` into event files in a folder of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(SinkCallback.Config):
        """How often and where."""

        log_steps: int = 1
        """Every this many steps, and at the first and the last."""
        folder: str = "tb_traces"
        """Where the files lie, below dump_folder; another place than that of a TensorBoard sink of `metrics`."""

        def sink(self) -> MetricsSink.Config:
            return TensorBoard.Config(interval_steps=self.log_steps, folder=self.folder)
