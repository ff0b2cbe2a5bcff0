"""MoEMonitorCallback: how evenly the routers load their experts, as metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from hyper_parallel.config.configurable import Configurable
from hyper_parallel.config.errors import ConfigError, Fault
from hyper_parallel.config.sections import at_least
from hyper_parallel.distributed.reductions import all_reduce_sum
from hyper_parallel.distributed.together import gathered
from hyper_parallel.protocols.roles import parameter_role
from hyper_parallel.trainer.callbacks.base import ConfiguredCallback, TrainerState

if TYPE_CHECKING:
    from hyper_parallel.trainer.base import BaseTrainer


class MoEMonitorCallback(ConfiguredCallback):
    """Counts the tokens of each expert over all micro-batches and ranks of a step, with one collective.

    The load of an expert is its tokens over the mean of its layer: 1 everywhere is balance, the number of experts is
    all tokens in one. The step's numbers get

    - `moe_max_load`: of the most loaded expert of all layers;
    - `moe_mean_max_load`: of the most loaded expert of a layer, mean over layers;
    - `moe_min_load`: of the least loaded expert of all layers;
    - `moe_idle_experts`: experts without a token, summed over layers.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """How often."""

        log_steps: int = 1
        """Every this many steps."""

        def faults(self) -> Iterator[Fault]:
            yield from at_least(self, 1, "log_steps")

    config: Config

    def __init__(self, config: Config, *, trainer: BaseTrainer) -> None:
        """Raises:
        ConfigError: no part of the model has a router.
        """
        super().__init__(config, trainer=trainer)
        modules = (module for part in trainer.model_parts for module in part.modules())
        has_router = any(
            parameter_role(module, name) == "router"
            for module in modules
            for name, _ in module.named_parameters(recurse=False)
        )
        if not any(gathered(has_router)):  # a stage of a pipeline may have none
            raise ConfigError.one(
                "_target_",
                f"MoEMonitorCallback: {type(trainer.model_parts[0]).__name__} has no experts",
                "leave it out, or train a mixture of experts",
            )
        self._tokens_LE: Tensor | None = None

    def on_substep_end(self, state: TrainerState) -> None:
        if state.global_step % self.config.log_steps == 0:
            assert state.model_output is not None and state.model_output.tokens_per_expert is not None
            tokens_LE = state.model_output.tokens_per_expert
            self._tokens_LE = tokens_LE if self._tokens_LE is None else self._tokens_LE + tokens_LE

    def on_step_end(self, state: TrainerState) -> None:
        if self._tokens_LE is None:
            return
        tokens_LE = all_reduce_sum(self._tokens_LE, self.trainer.parallel_dims.loss_group).cpu().double()
        self._tokens_LE = None
        load_LE = tokens_LE / tokens_LE.mean(-1, keepdim=True)
        state.add_metric("moe_max_load", float(load_LE.max()))
        state.add_metric("moe_mean_max_load", float(load_LE.amax(-1).mean()))
        state.add_metric("moe_min_load", float(load_LE.min()))
        state.add_metric("moe_idle_experts", int((tokens_LE == 0).sum()))
