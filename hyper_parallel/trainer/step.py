"""The arithmetic of one optimizer step that does not depend on the trainer: denominators, and checks of its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hyper_parallel.components.loss import IGNORE_INDEX
from hyper_parallel.distributed.reductions import all_reduce_sum
from hyper_parallel.protocols.model import ModelOutput
from hyper_parallel.protocols.module import canonical_name
from hyper_parallel.trainer.errors import NonFiniteError, NotFiniteHereError, TrainingError


def loss_scales(
    labels: list[Tensor],
    aggregation: Literal["token_weighted", "rank_average"],
    group: Any,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """What the loss sum of each micro-batch is multiplied by, so that the products add up to the loss of the step.

    With n_m valid tokens in micro-batch m, N their sum and M the number of micro-batches that have any, both over all
    micro-batches of all ranks in `group`: token_weighted gives 1 / N, rank_average gives 1 / (n_m M). A micro-batch
    without a valid token adds nothing under either, whatever its loss is; unless N is 0, where its loss counts, so that
    `check_step` sees it. One collective, of two integers.

    Args:
        labels: labels of each micro-batch of this rank's step, on the host.
        group: the ranks that read different rows of the step; None for one process.

    Returns:
        scales [micro-batches] in float64 where the device has it, else float32; and N, an int64 scalar.
    """
    valid_tokens = torch.tensor([int((x != IGNORE_INDEX).sum()) for x in labels], dtype=torch.int64)
    totals = torch.stack([valid_tokens.sum(), (valid_tokens > 0).sum()]).to(device)
    tokens, filled = all_reduce_sum(totals, group)
    denominators = tokens if aggregation == "token_weighted" else valid_tokens.to(device).clamp(min=1) * filled
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    scales = 1.0 / denominators.clamp(min=1).expand(len(labels)).to(dtype)
    counts = (valid_tokens.to(device) > 0) | (tokens == 0)
    return scales.where(counts, 0.0), tokens


def loss_shares(output: ModelOutput, scale: Tensor, step_rows: int) -> tuple[Tensor, Tensor | None]:
    """The share that a micro-batch has in the loss of the step and in its auxiliary loss (None without one): `scale` x
    (sum of the loss over its tokens), and (sum of the auxiliary loss over its rows) / `step_rows`."""
    assert output.loss_sum is not None, "the model was called with a loss_fn"
    return output.loss_sum * scale, None if output.aux_loss_sum is None else output.aux_loss_sum / step_rows


class StepTotals:
    """Adds up the scaled losses of a step's micro-batches, and sums them over ranks once."""

    def __init__(self) -> None:
        self._loss: Tensor | None = None
        self._aux_loss: Tensor | None = None

    def add(self, loss: Tensor, aux_loss: Tensor | None) -> None:
        """Adds one micro-batch's share of the step's loss and auxiliary loss, scalars."""
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        if aux_loss is not None:
            aux_loss = aux_loss.detach()
            self._aux_loss = aux_loss if self._aux_loss is None else self._aux_loss + aux_loss

    def reduce(self, group: Any, grad_norm: Tensor) -> tuple[float, float | None, float]:
        """The step's loss, auxiliary loss (None without one) and `grad_norm` as numbers: one collective, one copy."""
        assert self._loss is not None, "a step has at least one micro-batch"
        shares = [self._loss] if self._aux_loss is None else [self._loss, self._aux_loss.to(self._loss)]
        totals = all_reduce_sum(torch.stack(shares), group)
        loss, *aux_loss, norm = torch.cat([totals, grad_norm.to(totals)[None]]).tolist()
        return loss, (aux_loss[0] if aux_loss else None), norm


def check_step(
    step: int, valid_tokens: int, loss: float, grad_norm: float, last_checkpoint: Callable[[], Path | None]
) -> None:
    """Refuses a step whose numbers must not reach the weights. All ranks see the same numbers, so all of them raise.

    Args:
        last_checkpoint: gives the newest complete one, when all ranks ask; called where a number is not finite.

    Raises:
        NonFiniteError: the loss or the gradient norm is not finite.
        TrainingError: the loss is not zero though no label of the step is to be trained.
    """
    for quantity, value in (("the loss", loss), ("the gradient norm", grad_norm)):
        if not math.isfinite(value):
            raise NonFiniteError(step, quantity, value, last_checkpoint())
    if valid_tokens == 0 and loss != 0.0:
        raise TrainingError(
            f"step {step}: the loss is {loss} though no label of the step is to be trained (all are {IGNORE_INDEX}); "
            "a loss must be a sum over the labels that are"
        )


class FiniteGuard:
    """Names the first module whose output, or the parameters whose gradients, are not finite (debug.check_nan_inf)."""

    def __init__(self, model_parts: Sequence[nn.Module]) -> None:
        self._parts = model_parts
        for part in model_parts:
            for name, module in part.named_modules():
                module.register_forward_hook(self._output_hook(canonical_name(name) or type(module).__name__))

    @staticmethod
    def _output_hook(name: str) -> Callable[..., None]:
        def check(module: nn.Module, args: Any, output: Any) -> None:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.is_floating_point() and not torch.isfinite(leaf).all():
                    raise NotFiniteHereError(f"debug.check_nan_inf: the output of module {name!r} is not finite")

        return check

    def check_gradients(self) -> None:
        """Call it after the last backward pass of a step.

        Raises:
            NotFiniteHereError: naming every parameter whose gradient on this rank is not finite.
        """
        offenders = nonfinite_gradients(self._parts)
        if offenders:
            raise NotFiniteHereError(f"debug.check_nan_inf: gradients that are not finite: {', '.join(offenders)}")


def nonfinite_gradients(model_parts: Sequence[nn.Module]) -> dict[str, int]:
    """Canonical name of each parameter -> how many elements of its gradient on this rank are not finite, where any."""
    counts = {
        canonical_name(name): int((~torch.isfinite(_local(parameter.grad))).sum())
        for part in model_parts
        for name, parameter in part.named_parameters()
        if parameter.grad is not None
    }
    return {name: count for name, count in counts.items() if count}


def _local(tensor: Tensor) -> Tensor:
    """This rank's block of a DTensor, or the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
