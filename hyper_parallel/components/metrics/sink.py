"""Where the numbers of a step go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from hyper_parallel.components.metrics.record import StepMetrics
from hyper_parallel.config.configurable import Configurable


class MetricsSink(Configurable, ABC):
    """Takes the record of every step, in order. Built and called on the writing rank only."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Base of every sink's Config."""

    def __init__(self, config: Configurable.Config, *, dump_folder: str, training_steps: int) -> None:
        """Creates nothing yet: files and connections belong to `open`."""
        self.config = config
        self.dump_folder = dump_folder
        self.training_steps = training_steps

    def open(self, last_step: int) -> None:
        """Called before the first record. Steps up to `last_step` stand; what was written beyond it is void."""

    @abstractmethod
    def write(self, record: StepMetrics) -> None:
        """Takes the numbers of one step."""

    def close(self) -> None:
        """Finishes what `open` began. No record follows, unless the sink is opened again."""


def due(record: StepMetrics, first_step: int, interval_steps: int, training_steps: int) -> bool:
    """Whether a sink that speaks every `interval_steps` speaks at this step: the first and the last always count."""
    return record.step in (first_step, training_steps) or record.step % interval_steps == 0
