"""Learning rate by step: a pure function of the step, so a resumed run needs nothing but the step to go on exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from hyper_parallel.components.optimizer import OptimizersContainer
from hyper_parallel.config.configurable import Configurable
from hyper_parallel.config.errors import Fault, raise_faults
from hyper_parallel.config.sections import at_least


class LRSchedulersContainer(Configurable):
    """Sets the learning rate of every parameter group of every optimizer."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Shape of the schedule. Steps count from 0 here: the first optimizer step runs at the rate of step 0."""

        warmup_steps: int = 0
        """Steps in which the rate rises linearly from 0, the rate of the first step, to optimizer.lr."""
        decay_type: Literal["linear", "cosine", "constant", "wsd"] = "cosine"
        """How the rate falls to min_lr after warm-up. wsd: it stays, then falls linearly over the last decay_steps."""
        decay_steps: int | None = None
        """Steps that the fall takes. None: all that warm-up leaves (wsd: must be given)."""
        min_lr: float = 0.0
        """Where the fall ends, as a rate, not a fraction. Steps after the fall stay there."""

        def faults(self) -> Iterator[Fault]:
            yield from at_least(self, 0, "warmup_steps", "min_lr")
            yield from at_least(self, 1, "decay_steps")
            if self.decay_type == "wsd" and self.decay_steps is None:
                yield Fault("decay_steps", "None, but decay_type is wsd", "give the number of last steps that decay")
            if self.decay_type == "constant":
                if self.decay_steps is not None:
                    yield Fault(
                        "decay_steps",
                        f"{self.decay_steps} has no effect with decay_type constant",
                        "leave it out, or choose decay_type wsd",
                    )
                if self.min_lr > 0:
                    yield Fault(
                        "min_lr",
                        f"{self.min_lr} has no effect with decay_type constant",
                        "leave it out, or choose another decay_type",
                    )

        def faults_for(self, training_steps: int, peak_lr: float | None = None) -> Iterator[Fault]:
            """Faults of this schedule in a run of `training_steps` from `peak_lr` (None: not known yet).

            Paths are from the root.
            """
            taken = self.warmup_steps + (self.decay_steps or 0)
            if taken > training_steps:
                what = f"lr_scheduler.decay_steps {self.decay_steps} do" if self.decay_steps else "warm-up does"
                yield Fault(
                    "lr_scheduler.warmup_steps",
                    f"{self.warmup_steps}: with training.steps {training_steps}, {what} not fit",
                    f"let warmup_steps and decay_steps add up to {training_steps} or fewer",
                )
            if peak_lr is not None and self.min_lr > peak_lr > 0:  # another rate is a fault by itself
                yield Fault(
                    "lr_scheduler.min_lr",
                    f"{self.min_lr} is above optimizer.lr {peak_lr}, so the rate would rise where it should fall",
                    "lower min_lr or raise lr",
                )

        def lr_at(self, step: int, *, peak_lr: float, training_steps: int) -> float:
            """Rate of optimizer step `step`, counted from 0.

            With W = warmup_steps, D = decay_steps, N = training_steps::

                step < W:        peak_lr * step / W
                linear, cosine:  p = (step - W) / D, D = N - W unless given
                wsd:             p = (step - (N - D)) / D
                                 p is cut to [0, 1]
                lr               = min_lr + (peak_lr - min_lr) * f(p)
                f                = 1 - p (linear, wsd), (1 + cos(pi p)) / 2 (cosine), 1 (constant)

            min_lr itself is the rate of step W + D, so it is first met right after a fall that ends with the run.
            Cosine: Loshchilov and Hutter, 2017, without restarts. WSD: Hu et al., 2024 (MiniCPM).
            """
            if step < self.warmup_steps:
                return peak_lr * step / self.warmup_steps
            if self.decay_type == "constant":
                return peak_lr
            decay_steps = training_steps - self.warmup_steps if self.decay_steps is None else self.decay_steps
            begin = training_steps - decay_steps if self.decay_type == "wsd" else self.warmup_steps
            # A schedule that is all warm-up has no fall: whatever comes after it is its end.
            progress = min(max((step - begin) / decay_steps, 0.0), 1.0) if decay_steps > 0 else 1.0
            left = (1 + math.cos(math.pi * progress)) / 2 if self.decay_type == "cosine" else 1 - progress
            return self.min_lr + (peak_lr - self.min_lr) * left

    def __init__(self, config: Config, *, optimizers: OptimizersContainer, training_steps: int) -> None:
        """Takes the rate that each group has now as its peak, and sets that of step 0.

        Raises:
            ConfigError: the schedule does not fit in `training_steps`, or min_lr is above the peak of a group.
        """
        self.config = config
        self.training_steps = training_steps
        self._optimizers = optimizers
        self._peaks = [float(group["lr"]) for group in self._groups()]
        # A dict keeps one of each: groups mostly share their peak.
        raise_faults(dict.fromkeys(fault for peak in self._peaks for fault in config.faults_for(training_steps, peak)))
        self._step = 0
        self._apply()

    def step(self) -> None:
        """Goes on to the next step; call after the optimizers' step."""
        self._step += 1
        self._apply()

    def get_last_lr(self) -> float:
        """Rate of the first parameter group for the step to come."""
        return self._groups()[0]["lr"]

    def state_dict(self) -> dict[str, Any]:
        """Steps done. The shape is config: a resumed run follows its own, from the same step."""
        return {"step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to the saved step and sets its rates. Load the optimizers first: they carry rates of their own."""
        self._step = state_dict["step"]
        self._apply()

    def _groups(self) -> list[dict[str, Any]]:
        # Asked for anew each time: an optimizer that loads its state makes new groups.
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _apply(self) -> None:
        for group, peak in zip(self._groups(), self._peaks, strict=True):
            # A float: a tensor rate takes fused AdamW off its fast kernel on some accelerators.
            group["lr"] = self.config.lr_at(self._step, peak_lr=peak, training_steps=self.training_steps)
