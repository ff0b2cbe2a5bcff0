"""Optimizers of all model parts behind one object, with state named after the parameters it belongs to."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from hyper_parallel.config.configurable import Configurable
from hyper_parallel.config.errors import ConfigError, Fault
from hyper_parallel.protocols.roles import parameter_role

logger = logging.getLogger(__name__)

UNDECAYED_ROLES = frozenset({"norm", "bias"})
"""Roles that weight decay leaves alone: pulling a scale or an offset to zero is no regularisation of the function."""


class OptimizersContainer(Configurable):
    """One torch optimizer for each model part, stepped, saved and loaded together."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Base of every optimizer's Config."""

    def __init__(
        self,
        config: Configurable.Config,
        *,
        model_parts: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """`optimizers[i]` updates parameters of `model_parts[i]`.

        Raises:
            ConfigError: the two do not pair up, or an optimizer holds a parameter that its model part has not.
        """
        if len(model_parts) != len(optimizers):
            fact = f"{len(optimizers)} optimizer(s) for {len(model_parts)} model part(s)"
            raise ConfigError.one("optimizer", fact, "make one for each of model_parts, in an OptimizersContainer")
        for i, (part, optimizer) in enumerate(zip(model_parts, optimizers, strict=True)):
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            named = {id(p): name for name, p in part.named_parameters()}
            if strangers := len(held - named.keys()):
                fact = (
                    f"{type(optimizer).__name__} {i} holds {strangers} parameter(s) that its model part does not have, "
                    "so their state has no name to be saved under"
                )
                raise ConfigError.one("optimizer", fact, "build it from the parameters of the model that it is given")
            idle = [named[id(p)] for p in part.parameters() if p.requires_grad and id(p) not in held]
            if idle:
                logger.warning("not trained, because no optimizer holds them: %s", ", ".join(idle))
        self.config = config
        self.model_parts = list(model_parts)
        self.optimizers = list(optimizers)

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    def step(self) -> None:
        """Updates every parameter that has a gradient."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Frees all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """State by parameter name: ``state.<name>.<key>`` and ``param_groups.<name>.<key>``.

        Values are the live tensors, sharded where the parameters are, so a loader may read into them in place. The
        keys are the same whether or not a step was taken: a fresh optimizer answers with the state its first step
        would start from.
        """
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        options = StateDictOptions(flatten_optimizer_state_dict=True)
        state: dict[str, Any] = {}
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            _fill_state(optimizer)
            state.update(get_optimizer_state_dict(part, optimizer, options=options))
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict()` gave, settings of the parameter groups included.

        Raises:
            KeyError: a parameter of this optimizer is missing in `state_dict`.
        """
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        options = StateDictOptions(flatten_optimizer_state_dict=True)
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            _fill_state(optimizer)
            # A part's copy of a parameter has a state of its own: optimizers take over tensors as they are.
            copied = tuple(f"state.{name}." for name in getattr(part, "copied_parameters", ()))
            own = (
                {
                    key: value.clone() if key.startswith(copied) and isinstance(value, torch.Tensor) else value
                    for key, value in state_dict.items()
                }
                if copied
                else state_dict
            )
            set_optimizer_state_dict(part, optimizer, own, options=options)


class AdamW(OptimizersContainer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019, algorithm 2), by torch.optim.AdamW."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """Settings of AdamW."""

        lr: float = 8e-4
        """Peak learning rate; lr_scheduler scales it by step."""
        betas: tuple[float, float] = (0.9, 0.95)
        """Decay of the running means of the gradient and of its square."""
        eps: float = 1e-8
        """Added to the root of the second mean."""
        weight_decay: float = 0.1
        """A step takes lr x weight_decay of each weight away; norm scales and biases are left alone."""
        implementation: Literal["fused", "foreach", "for_loop"] = "fused"
        """fused: one kernel for all parameters. foreach: one kernel per operation. for_loop: one per parameter."""

        def faults(self) -> Iterator[Fault]:
            if not 0 < self.lr < math.inf:
                fact = "is not finite" if self.lr == math.inf else "is not above 0"
                yield Fault("lr", f"{self.lr} {fact}", "give a positive learning rate, such as 3e-4")
            if not all(0 <= beta < 1 for beta in self.betas):
                yield Fault("betas", f"{self.betas} is not within [0, 1)", "give two numbers such as (0.9, 0.95)")
            if not self.eps > 0:
                yield Fault("eps", f"{self.eps} is not above 0", "give a small positive number, such as 1e-8")
            if not 0 <= self.weight_decay < math.inf:
                fact = "is not finite" if self.weight_decay == math.inf else "is below 0"
                yield Fault("weight_decay", f"{self.weight_decay} {fact}", "give 0 (no decay) or more")

    def __init__(self, config: Config, *, model_parts: Sequence[nn.Module], **_for_targets: Any) -> None:
        """Builds one optimizer for each model part; other runtime arguments are for plain optimizers.

        Raises:
            ValueError: a model part has no parameter to train.
        """
        optimizers = [
            torch.optim.AdamW(
                parameter_groups([part]),
                lr=config.lr,
                betas=config.betas,
                eps=config.eps,
                weight_decay=config.weight_decay,
                fused=config.implementation == "fused",
                foreach=config.implementation == "foreach",
            )
            for part in model_parts
        ]
        super().__init__(config, model_parts=model_parts, optimizers=optimizers)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the running means; the settings stay those of this run's Config, and lr is the scheduler's.

        So are betas that torch's schedulers of cycles change, which mark their groups with `max_momentum`.

        Raises:
            KeyError: a parameter of this optimizer is missing in `state_dict`.
        """

        def own(group: dict[str, Any]) -> dict[str, Any]:
            others = {"params", "lr"} | ({"betas"} if "max_momentum" in group else set())
            return {key: value for key, value in group.items() if key not in others}

        settings = [[own(group) for group in optimizer.param_groups] for optimizer in self.optimizers]
        super().load_state_dict(state_dict)
        for optimizer, kept in zip(self.optimizers, settings, strict=True):
            for group, values in zip(optimizer.param_groups, kept, strict=True):
                group.update(values)


def parameter_groups(model_parts: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """Parameter groups for any torch optimizer: one that takes its weight decay, one with weight_decay 0.

    A parameter belongs to the second if its role is in UNDECAYED_ROLES. Tied parameters stand once, under their first
    owner; those that need no gradient are left out.

    Raises:
        ValueError: there is nothing to train.
    """
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    seen: set[int] = set()
    for part in model_parts:
        for module in part.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in seen or not parameter.requires_grad:
                    continue
                seen.add(id(parameter))
                (undecayed if parameter_role(module, name) in UNDECAYED_ROLES else decayed).append(parameter)
    if not seen:
        raise ValueError("the model has no parameter with requires_grad, so there is nothing to train; unfreeze some")
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": undecayed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adopt(product: Any, model_parts: Sequence[nn.Module]) -> OptimizersContainer:
    """`product` of the optimizer slot as a container: ours as it is, a torch optimizer wrapped.

    What has a `get_optimizer()` is asked for it.

    Raises:
        ConfigError: it is neither, or a torch optimizer for several model parts, or one with parameters of another
            model.
    """
    if not isinstance(product, OptimizersContainer | torch.optim.Optimizer) and hasattr(product, "get_optimizer"):
        product = product.get_optimizer()
    if isinstance(product, OptimizersContainer):
        return product
    if not isinstance(product, torch.optim.Optimizer):
        fact = f"the target made a {type(product).__name__}, which is neither a torch.optim.Optimizer nor a container"
        remedy = "return one, or an object whose get_optimizer() does"
        raise ConfigError.one("optimizer", fact, remedy)
    return OptimizersContainer(OptimizersContainer.Config(), model_parts=model_parts, optimizers=[product])


@torch.no_grad()
def _fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives each parameter that has no state yet the state that its first step would start from.

    torch.distributed.checkpoint does so by a step with zero gradients at a zero rate, but only while the whole
    optimizer is fresh: a parameter that never got a gradient has its keys missing in the checkpoint and present in the
    optimizer that loads it. It also leaves step counters at 1, and weight decay in SGD's momentum. So the same is done
    here before it, for each parameter that needs it, and exactly.
    """
    groups = optimizer.param_groups
    empty = [p for group in groups for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
    if not empty:
        return
    gradients = [(p, p.grad) for group in groups for p in group["params"]]
    for p, _ in gradients:
        p.grad = None
    for p in empty:
        p.grad = torch.zeros_like(p)
    zeroed = {"lr", "weight_decay"}
    settings = [{key: value for key, value in group.items() if key in zeroed} for group in groups]
    for group, kept in zip(groups, settings, strict=True):
        group.update(dict.fromkeys(kept, 0.0))
    optimizer.step()
    for group, kept in zip(groups, settings, strict=True):
        group.update(kept)
    for p, gradient in gradients:
        p.grad = gradient
    for p in empty:
        step = optimizer.state.get(p, {}).get("step")
        if isinstance(step, torch.Tensor):
            step.zero_()
        elif step is not None:
            optimizer.state[p]["step"] = 0
