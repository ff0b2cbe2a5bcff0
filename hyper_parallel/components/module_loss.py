"""Losses that are plain modules: ``forward(model_output, labels)`` gives a mean, in Hugging Face's manner."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.components.eval_mode import eval_mode
from hyper_parallel.components.loss import IGNORE_INDEX, AutoCELoss, BaseLoss, LMHead
from hyper_parallel.config.errors import ConfigError, Fault, RunError, raise_faults

LossSum = Callable[[Tensor, LMHead, Tensor], Tensor]
"""As BaseLoss: ``(hidden_BTD, lm_head, labels_BT)`` -> sum over valid tokens."""


class LossError(RunError):
    """What a module returned is no loss."""


class CausalLMOutput:
    """What a loss module sees of one micro-batch. `logits` and `loss` are computed when they are asked for."""

    def __init__(self, hidden_BTD: Tensor, lm_head: LMHead, labels_BT: Tensor, loss_sum: LossSum) -> None:
        self.hidden_states_BTD, self.lm_head, self.shift_labels_BT = hidden_BTD, lm_head, labels_BT
        self._loss_sum = loss_sum

    @cached_property
    def logits(self) -> Tensor:
        """[B, T, V]."""
        return self.lm_head(self.hidden_states_BTD)

    @cached_property
    def loss_sum(self) -> Tensor:
        """Scalar: cross entropy summed over the valid tokens, or what `prepare_model_inputs` has put in its place."""
        return self._loss_sum(self.hidden_states_BTD, self.lm_head, self.shift_labels_BT)

    @cached_property
    def valid_token_count(self) -> Tensor:
        """int64 scalar: labels that are trained."""
        return (self.shift_labels_BT != IGNORE_INDEX).sum()

    @cached_property
    def loss(self) -> Tensor:
        """Scalar: the mean over the valid tokens, 0 without one. A model's auxiliary loss is added by the trainer."""
        return self.loss_sum / self.valid_token_count.clamp(min=1)


class ModelOutputLoss(nn.Module):
    """The loss that the model's output has."""

    def forward(self, *, model_output: Any, labels: Tensor | None) -> Tensor:
        """`model_output.loss`."""
        del labels
        return model_output.loss


class ModuleLoss(BaseLoss):
    """Any module as a loss of ours.

    The module is called as ``module(model_output=..., labels=...)``: a `CausalLMOutput`, and labels as a dataset has
    them, not shifted. It returns the mean over the micro-batch, or a dict of such means, whose sum is minimised. It may
    have, beside forward:

    - ``bind_model(model, distributed_setup)``, called once when the model stands
    - ``prepare_model_inputs(model_inputs, loss_inputs)``, called before each micro-batch: returns the arguments of the
      model's forward (None: it has changed `model_inputs`). A `loss_fn` among them, see `LossSum`, is what the model
      computes in the place of logits. `loss_inputs` has `labels`, `shift_labels` and `loss_mask`.
    """

    def __init__(self, module: nn.Module, *, vocab_size: int) -> None:
        """
        Raises:
            ConfigError: the module has parameters, which no optimizer would train.
        """
        super().__init__(self.Config(), vocab_size=vocab_size)
        if names := [name for name, parameter in module.named_parameters() if parameter.requires_grad]:
            fact = f"{type(module).__name__} has parameters to train ({', '.join(names)}), which no optimizer would"
            raise ConfigError.one("loss", fact, "set requires_grad False, or put them in the model")
        self.module = module
        self._cross_entropy = AutoCELoss.Config().build(vocab_size=vocab_size)

    def bind(self, model: nn.Module, distributed_setup: Any) -> None:
        """Tells the module of the model, if it wants to know."""
        if hasattr(self.module, "bind_model"):
            self.module.bind_model(model, distributed_setup)

    def evaluating(self) -> AbstractContextManager[None]:
        return eval_mode([self.module])

    def model_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        prepare = getattr(self.module, "prepare_model_inputs", None)
        if prepare is None:
            return super().model_inputs(batch)
        labels_BT = batch["labels_BT"]
        model_inputs = {name: value for name, value in batch.items() if name != "labels_BT"}
        loss_inputs = {
            "labels": unshifted(labels_BT),
            "shift_labels": labels_BT,
            "loss_mask": labels_BT != IGNORE_INDEX,
        }
        returned = prepare(model_inputs, loss_inputs)
        prepared = dict(model_inputs if returned is None else returned)
        inside = prepared.pop("loss_fn", None)
        return {**prepared, "labels_BT": labels_BT, "loss_fn": partial(self, inside=inside)}

    def __call__(self, hidden_BTD: Tensor, lm_head: LMHead, labels_BT: Tensor, inside: LossSum | None = None) -> Tensor:
        """
        Raises:
            LossError: the module returned neither a scalar nor a dict of scalars.
        """
        output = CausalLMOutput(hidden_BTD, lm_head, labels_BT, inside or self._cross_entropy)
        if inside is not None:
            output.logits = None  # type: ignore[assignment]  # the whole of them does not exist
        returned = self.module(model_output=output, labels=unshifted(labels_BT))
        means = list(returned.values()) if isinstance(returned, dict) else [returned]
        strange = [_told(mean) for mean in means if not isinstance(mean, Tensor) or mean.dim()]
        if strange or not means:
            name, told = type(self.module).__name__, ", ".join(strange) or "an empty dict"
            raise LossError(f"loss: {name} returned {told}; return a mean as a scalar tensor, or a dict of such")
        # Of a micro-batch without a valid token the step takes nothing, or refuses what is not 0.
        return torch.stack(means).sum() * output.valid_token_count.clamp(min=1)


def _told(value: Any) -> str:
    return f"a tensor of {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def forward_faults(module_class: type[nn.Module]) -> Iterator[Fault]:
    """A fault if the forward of such a module cannot be called as that of a loss is."""
    try:
        inspect.signature(module_class.forward).bind(None, model_output=None, labels=None)
    except TypeError:
        fact = f"{module_class.__qualname__}.forward takes no model_output and labels"
        yield Fault("loss", fact, "derive a module from it with forward(*, model_output, labels)")


def unshifted(labels_BT: Tensor) -> Tensor:
    """Labels that are aligned with the logits as Hugging Face has them; the first of a row is not trained."""
    return torch.cat([torch.full_like(labels_BT[:, :1], IGNORE_INDEX), labels_BT[:, :-1]], dim=1)


def adopted_loss(product: Any, *, vocab_size: int) -> BaseLoss:
    """`product` of the loss slot as a loss of ours.

    Raises:
        ConfigError: it is neither that nor a module that can be called as a loss is.
    """
    if isinstance(product, BaseLoss):
        return product
    if isinstance(product, nn.Module):
        raise_faults(forward_faults(type(product)))
        return ModuleLoss(product, vocab_size=vocab_size)
    fact = f"the target made a {type(product).__name__}, which is neither a torch.nn.Module nor a BaseLoss"
    raise ConfigError.one("loss", fact, "derive it from torch.nn.Module, with forward(*, model_output, labels)")
