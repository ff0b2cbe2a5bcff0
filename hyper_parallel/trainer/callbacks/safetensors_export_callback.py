"""SafetensorsExportCallback: the model as folders that transformers loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hyper_parallel.config.configurable import Configurable
from hyper_parallel.config.errors import Fault
from hyper_parallel.config.sections import at_least
from hyper_parallel.trainer.callbacks.base import ConfiguredCallback, TrainerState

if TYPE_CHECKING:
    from hyper_parallel.trainer.base import BaseTrainer


class SafetensorsExportCallback(ConfiguredCallback):
    """Writes the weights to ``<dump_folder>/<folder>/step-<N>-hf``, a Hugging Face folder of safetensors."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """When and where."""

        save_steps: int = 0
        """Export every this many steps, beside the last one; 0 exports after the last one alone."""
        folder: str = "safetensors"
        """Where the folders lie, below dump_folder."""

        def faults(self) -> Iterator[Fault]:
            yield from at_least(self, 0, "save_steps")

    config: Config

    def __init__(self, config: Config, *, trainer: BaseTrainer) -> None:
        super().__init__(config, trainer=trainer)
        self._exported_step: int | None = None

    def on_step_end(self, state: TrainerState) -> None:
        if self.config.save_steps and state.global_step % self.config.save_steps == 0:
            self._export(state.global_step)

    def on_train_end(self, state: TrainerState) -> None:
        if self._exported_step != state.global_step:
            self._export(state.global_step)

    def _export(self, step: int) -> None:
        root = Path(self.trainer.config.dump_folder) / self.config.folder
        self.trainer.checkpointer.export_hf(root / f"step-{step}-hf")
        self._exported_step = step
