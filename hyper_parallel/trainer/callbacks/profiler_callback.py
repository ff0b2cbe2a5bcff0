"""ProfilerCallback: traces of a window of steps."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hyper_parallel.components.profiler import Profiler
from hyper_parallel.trainer.callbacks.base import ConfiguredCallback, TrainerState

if TYPE_CHECKING:
    from hyper_parallel.trainer.base import BaseTrainer


class ProfilerCallback(ConfiguredCallback):
    """Writes traces with a Profiler of its own, in the place of the run's `profiler`: a process can run one alone."""

    @dataclass(kw_only=True, slots=True)
    class Config(Profiler.Config):
        """Which steps of which ranks, and how much of them."""

        enable: bool = True
        """Write traces."""
        wait_steps: int = 1
        """Steps of this process before the window, to let it settle."""
        folder: str = "profiler_traces"
        """Where the traces lie, below dump_folder."""

    def __init__(self, config: Config, *, trainer: BaseTrainer) -> None:
        super().__init__(config, trainer=trainer)
        self._profiler = Profiler(config, dump_folder=trainer.config.dump_folder)
        self._running = ExitStack()

    def on_train_begin(self, state: TrainerState) -> None:
        self._running.enter_context(self._profiler)

    def on_step_end(self, state: TrainerState) -> None:
        self._profiler.step()

    def on_train_end(self, state: TrainerState) -> None:
        self._running.close()

    def close(self) -> None:
        self._running.close()
