"""MemoryMonitorCallback: memory of the process's device as metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hyper_parallel.config.configurable import Configurable
from hyper_parallel.config.errors import ConfigError, Fault
from hyper_parallel.config.sections import at_least
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.callbacks.base import ConfiguredCallback, TrainerState

if TYPE_CHECKING:
    from hyper_parallel.trainer.base import BaseTrainer


class MemoryMonitorCallback(ConfiguredCallback):
    """Adds all that the platform measures of the memory of this rank, as ``memory_<name of MemoryStats>``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """How often, and peaks of what."""

        log_steps: int = 50
        """Every this many steps."""
        reset_peak_each_step: bool = False
        """Let peaks, `memory_bytes` of every step included, be those of the step alone, and not of the run so far."""

        def faults(self) -> Iterator[Fault]:
            yield from at_least(self, 1, "log_steps")

    config: Config

    def __init__(self, config: Config, *, trainer: BaseTrainer) -> None:
        """Raises:
        ConfigError: the platform cannot measure memory.
        """
        super().__init__(config, trainer=trainer)
        if not _measured():
            raise ConfigError.one(
                "_target_", f"MemoryMonitorCallback: {get_platform().name} cannot measure memory", "leave it out"
            )

    def on_step_begin(self, state: TrainerState) -> None:
        if self.config.reset_peak_each_step:
            get_platform().reset_peak_memory()

    def on_step_end(self, state: TrainerState) -> None:
        if state.global_step % self.config.log_steps == 0:
            for name, value in _measured().items():
                state.add_metric(f"memory_{name}", value)


def _measured() -> dict[str, int]:
    """The fields of MemoryStats that are known here."""
    return {name: value for name, value in dataclasses.asdict(get_platform().memory()).items() if value is not None}
