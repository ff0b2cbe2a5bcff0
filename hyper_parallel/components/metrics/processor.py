"""MetricsProcessor: completes the numbers of each step and hands them to every sink."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from hyper_parallel.components.metrics.console import ConsoleLog
from hyper_parallel.components.metrics.json_lines import JsonLines
from hyper_parallel.components.metrics.progress_bar import ProgressBar
from hyper_parallel.components.metrics.record import StepMetrics
from hyper_parallel.components.metrics.sink import MetricsSink
from hyper_parallel.components.metrics.tensorboard import TensorBoard
from hyper_parallel.config.configurable import Buildable, Configurable, slot


def default_sinks() -> tuple[Buildable[MetricsSink], ...]:
    """Everything that needs no account: progress bar, log lines, metrics.jsonl and TensorBoard files."""
    return ProgressBar.Config(), ConsoleLog.Config(), JsonLines.Config(), TensorBoard.Config()


class MetricsProcessor(Configurable):
    """The one way of a step's numbers to wherever they are wanted."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Where the numbers go."""

        sinks: tuple[Buildable[MetricsSink], ...] = slot(default_sinks, runtime="dump_folder training_steps")
        """Who takes the numbers of each step, in this order."""

    def __init__(
        self,
        config: Config,
        *,
        dump_folder: str,
        training_steps: int,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        is_writer: bool = True,
    ) -> None:
        """Builds the sinks on the writing rank; on the others `log` does nothing.

        Args:
            training_steps: of the whole run, resumed parts included.
            flops_per_token: forward and backward, of the model.
            peak_flops: per second, of all devices of the run together. None: MFU stays unknown.
        """
        self.config = config
        self.sinks: list[MetricsSink] = (
            [sink.build(dump_folder=dump_folder, training_steps=training_steps) for sink in config.sinks]
            if is_writer
            else []
        )
        self._flops_share = flops_per_token / peak_flops if flops_per_token and peak_flops else None
        self._is_open = False

    def on_resume(self, step: int) -> None:
        """Opens the sinks after `step`, the last one that counts; 0 is a fresh run."""
        self.close()
        for sink in self.sinks:
            sink.open(step)
        self._is_open = True

    def complete(self, record: StepMetrics) -> StepMetrics:
        """`record` with its MFU, where that is known; numbers that are added to either are in both."""
        if self._flops_share is None:
            return record
        return dataclasses.replace(record, mfu=record.tokens_per_second * self._flops_share)

    def log(self, record: StepMetrics, sinks: Iterable[MetricsSink] | None = None) -> None:
        """Hands `record`, complete, to some of the sinks (None: all), opening all after the step before it if nobody
        did."""
        record = self.complete(record)
        if not self._is_open:
            self.on_resume(record.step - 1)
        for sink in self.sinks if sinks is None else sinks:
            sink.write(record)

    def close(self) -> None:
        """Closes the sinks; may be called again."""
        if self._is_open:
            self._is_open = False
            for sink in self.sinks:
                sink.close()
