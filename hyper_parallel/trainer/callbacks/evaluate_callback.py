"""EvaluateCallback: loss on held-out data while training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hyper_parallel.config.configurable import Configurable
from hyper_parallel.config.errors import Fault
from hyper_parallel.config.sections import at_least
from hyper_parallel.trainer.callbacks.base import ConfiguredCallback, TrainerState


class EvaluateCallback(ConfiguredCallback):
    """Runs the validator where a step is due and adds `validation_loss` to the step's numbers, once a step."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """When to validate."""

        eval_steps: int = 0
        """Every this many steps, beside what `validator` asks for; 0 adds none."""

        def faults(self) -> Iterator[Fault]:
            yield from at_least(self, 0, "eval_steps")

    config: Config

    def on_step_end(self, state: TrainerState) -> None:
        assert state.record is not None
        step, interval = state.global_step, self.config.eval_steps
        due = self.trainer.validator.due(step) or (interval > 0 and step % interval == 0)
        if due and "validation_loss" not in state.record.extra:
            state.add_metric("validation_loss", self.trainer.evaluate())


EvalCallback = EvaluateCallback
"""The legacy name."""
