"""GradientHealthCallback: names the parameters behind a gradient norm that no step should be taken with."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from hyper_parallel.config.configurable import Configurable
from hyper_parallel.config.errors import Fault
from hyper_parallel.config.sections import above_zero
from hyper_parallel.distributed.reductions import all_gather_object
from hyper_parallel.trainer.callbacks.base import ConfiguredCallback, TrainerState
from hyper_parallel.trainer.errors import TrainingError
from hyper_parallel.trainer.step import nonfinite_gradients

NAMED = 5
"""Parameters that the error names."""


class GradientHealthCallback(ConfiguredCallback):
    """Stops every rank before the weights take up gradients that are not finite, or too large.

    The norm is over all gradients of all ranks and the same on each, so in a healthy step looking at it is enough.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """What is too large."""

        max_norm: float | None = None
        """Stop where the gradient norm before clipping is above this. None: any finite norm will do."""

        def faults(self) -> Iterator[Fault]:
            yield from above_zero(self, "max_norm")

    config: Config

    def on_pre_optimizer_step(self, state: TrainerState) -> None:
        """Raises:
        TrainingError: the same one on every rank.
        """
        norm, limit = state.grad_norm, self.config.max_norm
        assert norm is not None
        if not math.isfinite(norm):
            raise TrainingError(
                f"step {state.global_step}: the gradient norm is {norm}, so no weight was changed; "
                f"{self._offenders()}; lower optimizer.lr, or find the module with debug.check_nan_inf"
            )
        if limit is not None and norm > limit:
            raise TrainingError(
                f"step {state.global_step}: the gradient norm is {norm:.6g}, above the {limit:.6g} of "
                "GradientHealthCallback, so no weight was changed; lower optimizer.lr, or raise max_norm"
            )

    def _offenders(self) -> str:
        """Which gradients are not finite, on which ranks; the same text on every rank. A collective."""
        elements: dict[str, int] = defaultdict(int)
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, here in enumerate(all_gather_object(nonfinite_gradients(self.trainer.model_parts))):
            for name, count in here.items():
                elements[name] += count
                ranks[name].append(rank)
        if not elements:
            return "every gradient is finite, but the sum of their squares is not"
        named = [
            f"{name} ({elements[name]} on rank{'s' if len(ranks[name]) > 1 else ''} {', '.join(map(str, ranks[name]))})"
            for name in list(elements)[:NAMED]
        ]
        more = f" and {len(elements) - NAMED} more parameters" if len(elements) > NAMED else ""
        return f"gradients with elements that are not finite: {', '.join(named)}{more}"
