"""SinkCallback: hands the numbers of each step to a place where metrics go."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hyper_parallel.components.metrics import MetricsProcessor, MetricsSink
from hyper_parallel.config.configurable import Configurable
from hyper_parallel.config.errors import Fault
from hyper_parallel.distributed.process_group import rank
from hyper_parallel.trainer.callbacks.base import ConfiguredCallback, TrainerState

if TYPE_CHECKING:
    from hyper_parallel.trainer.base import BaseTrainer


class SinkCallback(ConfiguredCallback, ABC):
    """Hands the complete record of each step to a sink of its own, beside those that `metrics` has."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config, ABC):
        """How often."""

        log_steps: int = 10
        """Every this many steps, and at the first and the last."""

        @abstractmethod
        def sink(self) -> MetricsSink.Config:
            """The sink, with `log_steps` as its interval."""

        def faults(self) -> Iterator[Fault]:
            for fault in self.sink().faults():
                yield dataclasses.replace(fault, path="log_steps") if fault.path == "interval_steps" else fault

    def __init__(self, config: Config, *, trainer: BaseTrainer, metrics: MetricsProcessor | None = None) -> None:
        """`metrics`: those of the run, whose sinks have intervals of their own. None: one with the sink of `config`."""
        super().__init__(config, trainer=trainer)
        if metrics is None:
            metrics = MetricsProcessor.Config(sinks=(config.sink(),)).build(
                dump_folder=trainer.config.dump_folder,
                training_steps=trainer.training_steps,
                is_writer=rank() == 0,
            )
        self._metrics = metrics

    def on_log(self, state: TrainerState) -> None:
        assert state.record is not None
        self._metrics.log(state.record, [sink for sink in self._metrics.sinks if self.takes(sink)])

    def takes(self, sink: MetricsSink) -> bool:
        """Whether `sink` gets its numbers from this callback."""
        return True

    def close(self) -> None:
        self._metrics.close()
