"""One progress bar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from hyper_parallel.components.metrics.record import RateWindow, StepMetrics
from hyper_parallel.components.metrics.sink import MetricsSink, due
from hyper_parallel.config.errors import Fault
from hyper_parallel.config.sections import at_least


class ProgressBar(MetricsSink):
    """A tqdm bar on a terminal, with log lines printed above it. Nothing elsewhere: a file has no use for a bar."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsSink.Config):
        """How often the rate is taken."""

        interval_steps: int = 10
        """The rate shown is that of the last this many steps; step and loss are always the latest."""

        def faults(self) -> Iterator[Fault]:
            yield from at_least(self, 1, "interval_steps")

    def __init__(self, config: Config, *, dump_folder: str, training_steps: int) -> None:
        super().__init__(config, dump_folder=dump_folder, training_steps=training_steps)
        self._interval_steps = config.interval_steps
        self._open = ExitStack()

    def open(self, last_step: int) -> None:
        from tqdm import tqdm
        from tqdm.contrib.logging import logging_redirect_tqdm

        self._first_step = last_step + 1
        self._window = RateWindow()
        # disable=None: only on a terminal.
        self._bar = self._open.enter_context(
            tqdm(total=self.training_steps, initial=last_step, unit="step", dynamic_ncols=True, disable=None)
        )
        if not self._bar.disable:
            self._open.enter_context(logging_redirect_tqdm())

    def write(self, record: StepMetrics) -> None:
        self._window.add(record)
        if due(record, self._first_step, self._interval_steps, self.training_steps):
            self._window.close()
        shown: dict[str, Any] = {
            "loss": f"{record.loss:.4f}",
            "tokens/s": f"{self._window.tokens_per_second:,.0f}",
        }
        if self._window.mfu is not None:
            shown["MFU"] = f"{self._window.mfu:.1%}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._open.close()
