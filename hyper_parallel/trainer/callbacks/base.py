"""Callback: an observer of a run. TrainerState: what it sees."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, SupportsFloat

from hyper_parallel.components.metrics import StepMetrics
from hyper_parallel.config.configurable import Configurable
from hyper_parallel.protocols.model import ModelOutput

if TYPE_CHECKING:
    from hyper_parallel.trainer.base import BaseTrainer


@dataclass(kw_only=True)
class TrainerState:
    """How far the run has come, which checkpoints keep, and what belongs to the moment. A trainer has one."""

    global_step: int = 0
    """Optimizer steps, the one in progress included: the first on_step_begin sees 1."""
    tokens: int = 0
    """Tokens of all finished steps, over all ranks."""
    max_steps: int = 0
    """Optimizer steps of the whole run, resumed parts included."""
    epoch: int = 0
    """The pass over the data that the first row of the step belongs to, counted from 0. Set from on_train_begin on."""
    record: StepMetrics | None = None
    """The numbers of the newest step. Set before on_step_end; `add_metric` may add to it until on_log, which sees it
    complete. None before the first step."""
    step_train_metrics: dict[str, float | None] = field(default_factory=dict)
    """Of `record`, what tells of the training: loss, grad_norm, lr, and all that was added."""
    step_env_metrics: dict[str, float | None] = field(default_factory=dict)
    """Of `record`, what tells of its pace and place: tokens, times, rates, memory."""
    model_output: ModelOutput | None = None
    """What the model gave for the micro-batch, at on_substep_end; else None."""
    grad_norm: float | None = None
    """The gradient norm before clipping, the same on all ranks. Set before on_pre_optimizer_step, and not yet known to
    be finite there."""
    checkpoint_folder: Path | None = None
    """The checkpoint that was last saved or taken up. Set before on_save and on_load. With checkpoint.async_mode it may
    still be written at on_save: it stands under its name once it is complete."""
    validation_loss: float | None = None
    """The newest loss on held-out data. Set before on_evaluate."""

    @property
    def step(self) -> int:
        """`global_step`, under the name that checkpoints keep it by."""
        return self.global_step

    def add_metric(self, name: str, value: SupportsFloat | None) -> None:
        """Adds a number to the record of the step; every place that metrics go to takes it. For on_step_end.

        Raises:
            ValueError: a step has a number of this name already that is not an added one.
            TypeError, ValueError: `value` is no number, nor a tensor or array of one.
        """
        assert self.record is not None, "no step has ended yet"
        if name not in self.record.extra and name in self.record.as_dict():
            raise ValueError(f"{name!r} is a number that every step has; give the added one another name")
        if value is not None and not isinstance(value, (int, float)):
            value = float(value)
        self.record.extra[name] = self.step_train_metrics[name] = value

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {"step": self.global_step, "tokens": self.tokens}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Takes up what `state_dict` gave."""
        self.global_step, self.tokens = state["step"], state["tokens"]


class Callback:
    """Watches a run: each moment is a method, which does nothing unless a subclass says what.

    All ranks run the same moments in the same order, so a callback may use collectives. What it raises ends the run;
    it changes nothing about the steps themselves.
    """

    def __init__(self, trainer: BaseTrainer) -> None:
        self.trainer = trainer

    def on_init_end(self, state: TrainerState) -> None:
        """The trainer is built. Of a callback that is added later: it is added."""

    def on_train_begin(self, state: TrainerState) -> None:
        """The first step of this process is next; a checkpoint is taken up already. Not called when all are done."""

    def on_train_end(self, state: TrainerState) -> None:
        """The last step of the run has ended, and its checkpoint is saved. Not called when the run fails."""

    def on_epoch_begin(self, state: TrainerState) -> None:
        """The next step, `global_step` + 1, is the first of `epoch`, or the first of this process."""

    def on_epoch_end(self, state: TrainerState) -> None:
        """The last step of `epoch` has ended, or of the run."""

    def on_step_begin(self, state: TrainerState) -> None:
        """The batch of step `global_step` will now be asked for."""

    def on_substep_end(self, state: TrainerState) -> None:
        """The gradients of one micro-batch are added. `model_output` is what the model gave."""

    def on_pre_optimizer_step(self, state: TrainerState) -> None:
        """The gradients are complete and clipped. `grad_norm` is known; it and the loss are not yet checked."""

    def on_step_end(self, state: TrainerState) -> None:
        """The weights are updated. `record` holds the step's numbers, to which `add_metric` may add."""

    def on_log(self, state: TrainerState) -> None:
        """`record` is complete. Every step, after on_step_end of all callbacks and before the step may be saved."""

    def on_save(self, state: TrainerState) -> None:
        """A checkpoint is complete in `checkpoint_folder`, or with checkpoint.async_mode begun."""

    def on_load(self, state: TrainerState) -> None:
        """The run is taken up from `checkpoint_folder`."""

    def on_evaluate(self, state: TrainerState) -> None:
        """`validation_loss` is measured."""

    def close(self) -> None:
        """Ends threads and files, after a failure too, when other ranks may be gone: no collectives. Not a moment; it
        may be called again."""


class ConfiguredCallback(Callback, Configurable):
    """A callback that is built from a nested Config."""

    def __init__(self, config: Configurable.Config, *, trainer: BaseTrainer) -> None:
        super().__init__(trainer)
        self.config = config
