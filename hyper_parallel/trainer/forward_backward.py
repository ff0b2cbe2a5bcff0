"""Forward and backward passes of one optimizer step: one micro-batch after the other, or in a pipeline of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hyper_parallel.components.loss import BaseLoss
from hyper_parallel.distributed.fsdp import gradient_sync
from hyper_parallel.protocols.model import BaseModel, ModelOutput
from hyper_parallel.trainer.step import loss_shares

if TYPE_CHECKING:
    from hyper_parallel.distributed.pipeline import Pipeline

MicroBatch = dict[str, Any]
GetBatch = Callable[[MicroBatch], dict[str, Any]]
"""The trainer's hook: from a micro-batch to the arguments of the model's forward."""


class ForwardBackward(Protocol):
    """How the gradients of a step come about.

    The objective is the sum of `loss_shares` over micro-batches and ranks, which does not depend on how rows are split.
    """

    def __call__(self, micro_batches: Sequence[MicroBatch], scales: Tensor) -> Iterator[ModelOutput]:
        """Adds the gradients of all micro-batches. Yields what the model gave for each once its gradients are added.

        Args:
            scales: [micro-batches], of `loss_scales`.
        """

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """The sum of the loss over the tokens of all micro-batches of this data-parallel rank, without gradients."""


class Accumulation:
    """The whole model is here: one micro-batch after the other, whose gradients add up."""

    def __init__(self, model_parts: list[BaseModel], loss: BaseLoss, get_batch: GetBatch, step_rows: int) -> None:
        """`step_rows`: rows in one optimizer step, over all ranks."""
        self._parts, self._loss, self._get_batch, self._step_rows = model_parts, loss, get_batch, step_rows

    def __call__(self, micro_batches: Sequence[MicroBatch], scales: Tensor) -> Iterator[ModelOutput]:
        for index, (micro_batch, scale) in enumerate(zip(micro_batches, scales, strict=True)):
            gradient_sync(self._parts, last=index == len(micro_batches) - 1)
            output = self._forward(micro_batch)
            objective(output, scale, self._step_rows).backward()
            yield output

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        with self._loss.evaluating():
            return torch.stack([_loss_sum(self._forward(micro_batch)) for micro_batch in micro_batches]).sum()

    def _forward(self, micro_batch: MicroBatch) -> ModelOutput:
        output: ModelOutput = self._parts[0](**self._loss.model_inputs(self._get_batch(micro_batch)))
        return output


class Pipelined:
    """The model is spread over ranks: all micro-batches of the step pass through the pipeline together."""

    def __init__(self, pipeline: Pipeline, loss: BaseLoss, get_batch: GetBatch, step_rows: int) -> None:
        """`step_rows`: rows in one optimizer step, over all ranks."""
        self._pipeline, self._loss, self._get_batch, self._step_rows = pipeline, loss, get_batch, step_rows

    def __call__(self, micro_batches: Sequence[MicroBatch], scales: Tensor) -> Iterator[ModelOutput]:
        yield from self._pipeline.train(
            self._batches(micro_batches), lambda output, index: objective(output, scales[index], self._step_rows)
        )

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        with self._loss.evaluating():
            return torch.stack([_loss_sum(o) for o in self._pipeline.evaluate(self._batches(micro_batches))]).sum()

    def _batches(self, micro_batches: Sequence[MicroBatch]) -> list[dict[str, Any]]:
        return [self._loss.model_inputs(self._get_batch(micro_batch)) for micro_batch in micro_batches]


def objective(output: ModelOutput, scale: Tensor, step_rows: int) -> Tensor:
    """What is differentiated of one micro-batch."""
    loss, aux_loss = loss_shares(output, scale, step_rows)
    return loss if aux_loss is None else loss + aux_loss


def _loss_sum(output: ModelOutput) -> Tensor:
    assert output.loss_sum is not None, "the model was called with a loss_fn"
    return output.loss_sum
