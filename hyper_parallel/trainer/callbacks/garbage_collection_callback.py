"""GarbageCollectionCallback: Python's garbage collector, run at the same step on every rank.

Left to itself each rank collects at a moment of its own, and all the others wait for it in their next collective.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hyper_parallel.config.configurable import Configurable
from hyper_parallel.config.errors import Fault
from hyper_parallel.config.sections import at_least
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.callbacks.base import ConfiguredCallback, TrainerState

if TYPE_CHECKING:
    from hyper_parallel.trainer.base import BaseTrainer


class GarbageCollectionCallback(ConfiguredCallback):
    """While training, garbage is collected at the due steps alone; and the accelerator's cache is emptied at others."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """When to collect. The default chain does what `training` says."""

        gc_steps: int = 50
        """Collect Python garbage every this many steps; 0 leaves it to Python."""
        empty_cache_steps: int = 0
        """Return cached accelerator memory every this many steps; 0 is never."""

        def faults(self) -> Iterator[Fault]:
            yield from at_least(self, 0, "gc_steps", "empty_cache_steps")

    config: Config

    def __init__(self, config: Config, *, trainer: BaseTrainer) -> None:
        super().__init__(config, trainer=trainer)
        self._in_charge = self._was_enabled = False

    def on_train_begin(self, state: TrainerState) -> None:
        if self.config.gc_steps:
            gc.collect()
            gc.freeze()  # what was built stays to the end: later collections need not look at it
            self._in_charge, self._was_enabled = True, gc.isenabled()
            gc.disable()

    def on_step_end(self, state: TrainerState) -> None:
        if self.config.gc_steps and state.global_step % self.config.gc_steps == 0:
            gc.collect()
        if self.config.empty_cache_steps and state.global_step % self.config.empty_cache_steps == 0:
            get_platform().empty_cache()

    def on_train_end(self, state: TrainerState) -> None:
        self.close()

    def close(self) -> None:
        if self._in_charge:
            self._in_charge = False
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()


GCCallback = GarbageCollectionCallback
"""The legacy name."""
