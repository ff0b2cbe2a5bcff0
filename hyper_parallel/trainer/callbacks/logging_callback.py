"""LoggingCallback: log lines, and with them every sink of the run's metrics but the progress bar."""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.components.metrics import ConsoleLog, MetricsSink, ProgressBar
from hyper_parallel.trainer.callbacks.sink_callback import SinkCallback


class LoggingCallback(SinkCallback):
    """Writes log lines. The one of the default chain hands the run's metrics to their sinks, all but the bar."""

    @dataclass(kw_only=True, slots=True)
    class Config(SinkCallback.Config):
        """How often to write a line, beside those that `metrics` writes."""

        def sink(self) -> MetricsSink.Config:
            return ConsoleLog.Config(interval_steps=self.log_steps)

    def takes(self, sink: MetricsSink) -> bool:
        return not isinstance(sink, ProgressBar)
