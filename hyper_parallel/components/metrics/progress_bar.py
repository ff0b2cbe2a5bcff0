"""One progress bar."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

from hyper_parallel.components.metrics.record import StepMetrics
from hyper_parallel.components.metrics.sink import PeriodicSink


class ProgressBar(PeriodicSink):
    """A tqdm bar on a terminal, with log lines printed above it. Nothing elsewhere: a file has no use for a bar."""

    def open(self, last_step: int) -> None:
        from tqdm import tqdm
        from tqdm.contrib.logging import logging_redirect_tqdm

        super().open(last_step)
        self._open = ExitStack()
        # disable=None: only on a terminal.
        self._bar = self._open.enter_context(
            tqdm(total=self.training_steps, initial=last_step, unit="step", dynamic_ncols=True, disable=None)
        )
        if not self._bar.disable:
            # Ours has a handler of its own, which the root's redirection would not reach.
            loggers = [logging.root, logging.getLogger("hyper_parallel")]
            self._open.enter_context(logging_redirect_tqdm(loggers))

    def write(self, record: StepMetrics) -> None:
        self.is_due(record)
        shown: dict[str, Any] = {
            "loss": f"{record.loss:.4f}",
            "tokens/s": f"{self.window.tokens_per_second:,.0f}",
        }
        if self.window.mfu is not None:
            shown["MFU"] = f"{self.window.mfu:.1%}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._open.close()
