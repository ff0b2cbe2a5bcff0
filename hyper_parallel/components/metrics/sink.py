"""Where the numbers of a step go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from hyper_parallel.components.metrics.record import RateWindow, StepMetrics
from hyper_parallel.config.configurable import Configurable
from hyper_parallel.config.errors import Fault
from hyper_parallel.config.sections import at_least


class MetricsSink(Configurable, ABC):
    """Takes the record of every step, in order. Built and called on the writing rank only."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Base of every sink's Config."""

        def writes_to(self) -> str | None:
            """What no other sink of the run may write to, below dump_folder. None: there is nothing of the kind."""
            return None

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


class PeriodicSink(MetricsSink):
    """A sink that speaks every few steps, with rates over the steps since it last spoke."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsSink.Config):
        """How often."""

        interval_steps: int = 10
        """Rates are taken anew every this many steps, and at the first and the last."""

        def faults(self) -> Iterator[Fault]:
            yield from at_least(self, 1, "interval_steps")

    config: Config

    def open(self, last_step: int) -> None:
        self._first_step = last_step + 1
        self.window = RateWindow()

    def is_due(self, record: StepMetrics) -> bool:
        """Adds `record` to the window; closes the window and says so where this step ends one."""
        self.window.add(record)
        edge = record.step in (self._first_step, self.training_steps)
        if not edge and record.step % self.config.interval_steps:
            return False
        self.window.close()
        return True
