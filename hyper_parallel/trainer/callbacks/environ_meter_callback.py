"""EnvironMeterCallback: publishes the numbers of each step."""

from __future__ import annotations

from hyper_parallel.trainer.callbacks.base import Callback, TrainerState

ENVIRONMENT = (
    *("tokens", "step_seconds", "tokens_per_second", "data_seconds", "memory_bytes", "mfu"),
    *("checkpoint_bytes", "checkpoint_seconds", "checkpoint_stall_seconds"),
)
"""The numbers of a step that tell nothing of the model."""


class EnvironMeterCallback(Callback):
    """Completes the record that the trainer made and publishes it in the state, once a step and first of all.

    It reduces nothing over ranks: the trainer's own sums, one collective a step, are all that anybody reads.
    """

    def on_train_begin(self, state: TrainerState) -> None:
        self.trainer.metrics.on_resume(state.global_step)

    def on_step_end(self, state: TrainerState) -> None:
        assert state.record is not None
        state.record = self.trainer.metrics.complete(state.record)
        numbers = state.record.as_dict()
        del numbers["step"]
        state.step_env_metrics = {name: numbers.pop(name) for name in ENVIRONMENT if name in numbers}
        state.step_train_metrics = numbers
