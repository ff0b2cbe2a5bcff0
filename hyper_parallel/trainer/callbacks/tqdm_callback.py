"""TqdmCallback: a progress bar."""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.components.metrics import MetricsSink, ProgressBar
from hyper_parallel.trainer.callbacks.sink_callback import SinkCallback


class TqdmCallback(SinkCallback):
    """Moves a progress bar on a terminal. The one of the default chain moves those of the run's metrics."""

    @dataclass(kw_only=True, slots=True)
    class Config(SinkCallback.Config):
        """How often to take the rates anew that the bar shows."""

        def sink(self) -> MetricsSink.Config:
            return ProgressBar.Config(interval_steps=self.log_steps)

    def takes(self, sink: MetricsSink) -> bool:
        return isinstance(sink, ProgressBar)


ProgressCallback = TqdmCallback
"""The legacy name."""
