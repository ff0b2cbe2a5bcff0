"""CheckpointCallback: more checkpoints than the checkpoint manager makes by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hyper_parallel.config.configurable import Configurable
from hyper_parallel.config.errors import Fault
from hyper_parallel.config.sections import at_least
from hyper_parallel.trainer.callbacks.base import ConfiguredCallback, TrainerState


class CheckpointCallback(ConfiguredCallback):
    """Saves through the run's checkpoint manager, beside its own interval, and no step twice.

    Whether a run resumes from what is saved is up to `checkpoint.enable`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """When to save."""

        save_steps: int = 500
        """Save every this many steps, and after the last one."""

        def faults(self) -> Iterator[Fault]:
            yield from at_least(self, 1, "save_steps")

    config: Config

    def on_log(self, state: TrainerState) -> None:
        # Not in on_step_end: the numbers of a step that is saved stand in metrics.jsonl, or no later run writes them.
        if state.global_step % self.config.save_steps == 0:
            self.trainer.save_checkpoint()

    def on_train_end(self, state: TrainerState) -> None:
        self.trainer.save_checkpoint()
