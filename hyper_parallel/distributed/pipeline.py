"""The parts of a model on this rank as stages of a pipeline, run by a schedule of torch.distributed.pipelining.

Importing this file costs as much as torch itself: do it where a pipeline is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from hyper_parallel.config.errors import RunError
from hyper_parallel.config.sections import ParallelismConfig
from hyper_parallel.distributed.parallel_dims import ParallelDims
from hyper_parallel.distributed.pipeline_plan import schedule_of, stages_of_rank, stages_per_rank
from hyper_parallel.distributed.reductions import all_reduce_sum
from hyper_parallel.protocols.model import BaseModel, ModelOutput

Objective = Callable[[ModelOutput, int], Tensor]
"""`(output of the last part, index of the micro-batch)` -> the scalar that is differentiated."""


class Stage(PipelineStage):
    """One part of the model. Every stage sees all arguments of every micro-batch, and sends tensors alone."""

    batches: Sequence[dict[str, Any]]
    """Arguments of the model's forward, by micro-batch."""
    outputs: list[ModelOutput]
    """What the part gave, by micro-batch, detached."""

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        # Of its own accord the schedule would cut one batch into chunks; ours come cut, each with its documents.
        return super().forward_one_chunk(fwd_chunk_id, args, self.batches[fwd_chunk_id], save_forward_output)

    def forward_maybe_with_nosync(self, *received: Tensor, **batch: Any) -> tuple[Tensor, ...]:
        output = self.submod(received=received, **batch)
        self.outputs.append(
            ModelOutput(
                loss_sum=_detached(output.loss_sum),
                aux_loss_sum=_detached(output.aux_loss_sum),
                tokens_per_expert=output.tokens_per_expert,
            )
        )
        return output.sent or tuple(loss for loss in (output.loss_sum, output.aux_loss_sum) if loss is not None)

    # Evaluation runs the same schedule, whose backward actions do nothing; torch leaves out these three.

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)


class Pipeline:
    """Forward and backward passes of a whole optimizer step over the ranks of one pipeline, which call it together."""

    def __init__(
        self,
        model_parts: Sequence[BaseModel],
        parallel_dims: ParallelDims,
        parallelism: ParallelismConfig,
        *,
        micro_batches: int,
        rows: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            model_parts: those of this rank, in order, parallelised.
            micro_batches: in one step, each of `rows` x `tokens`.
            dtype: of the activations between parts.
        """
        assert parallel_dims.pp_group is not None, "a pipeline has more than one rank"
        self._parts, self._group = model_parts, parallel_dims.pp_group
        self._micro_batches, self._shape = micro_batches, (rows, tokens)
        count = parallelism.pp * stages_per_rank(parallelism)
        boundary = model_parts[0].boundary(rows, tokens, dtype, parallelism)
        losses = (torch.empty((), device="meta"),) * 2
        self._stages = [
            Stage(
                part,
                index,
                count,
                device,
                input_args=boundary if index > 0 else (),
                output_args=boundary if index < count - 1 else losses,
                group=self._group,
            )
            for part, index in zip(model_parts, stages_of_rank(parallelism, parallel_dims.pp_rank), strict=True)
        ]
        schedule = get_schedule_class(schedule_of(parallelism).torch_name)
        stages = self._stages if issubclass(schedule, PipelineScheduleMulti) else self._stages[0]
        self._schedule = schedule(stages, micro_batches, loss_fn=self._loss, scale_grads=False)
        self._last_rank = self._stages[0].stage_index_to_group_rank[count - 1]
        self._copied = self._copied_parameters()

    def train(self, batches: Sequence[dict[str, Any]], objective: Objective) -> list[ModelOutput]:
        """Adds the gradients of all micro-batches, summed over data-parallel ranks and over copies of parameters.

        Args:
            batches: arguments of the model's forward for each micro-batch; the same on all ranks of the pipeline.

        Returns:
            What the whole model gave for each micro-batch, detached, on every rank.

        Raises:
            RunError: there is another number of micro-batches than the schedule was made for, or one has another shape.
        """
        self._run(self._schedule.step, batches, objective)
        self._sum_copied_gradients()
        return self._outputs()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[dict[str, Any]]) -> list[ModelOutput]:
        """As `train`, without gradients."""
        self._run(self._schedule.eval, batches, lambda output, _: output.loss_sum)
        return self._outputs()

    def _run(self, run: Callable[..., Any], batches: Sequence[dict[str, Any]], objective: Objective) -> None:
        if len(batches) != self._micro_batches:
            raise RunError(
                f"the dataloader gave {len(batches)} micro-batches for a step, but the pipeline was made for "
                f"{self._micro_batches}; a dataloader gives global_batch_size / (micro_batch_size x data-parallel size)"
            )
        shapes = {tuple(batch["input_ids_BT"].shape) for batch in batches} - {self._shape}
        if shapes:
            raise RunError(
                f"a micro-batch has [rows, tokens] {list(min(shapes))}, but parallelism.pp sends all from stage to "
                f"stage as training.micro_batch_size x training.seq_len, {list(self._shape)}; pad them in dataset or "
                "collate_fn"
            )
        self._objective = objective
        for stage in self._stages:
            stage.batches, stage.outputs = batches, []
        try:
            run(target=torch.arange(self._micro_batches), return_outputs=False)
        except RuntimeError as error:
            if isinstance(error.__cause__, RunError):  # torch hides what a module raised in an error of its own
                raise error.__cause__ from None
            raise

    def _loss(self, output: tuple[Tensor, ...], micro_batch: Tensor) -> Tensor:
        return self._objective(ModelOutput(None, *output), int(micro_batch))

    def _outputs(self) -> list[ModelOutput]:
        """The outputs of all parts on all ranks together: those of the last part, and the counts of every part."""
        device = self._stages[0].device
        wide = torch.float64 if device.type == "cpu" else torch.float32
        losses_M3 = torch.zeros(self._micro_batches, 3, dtype=wide, device=device)  # the third: is there an auxiliary
        counts = []
        for stage in self._stages:
            for row, output in zip(losses_M3, stage.outputs, strict=True):
                if output.loss_sum is not None:
                    row[0] = output.loss_sum
                if output.aux_loss_sum is not None:
                    row[1], row[2] = output.aux_loss_sum, 1
            counts.append([o.tokens_per_expert for o in stage.outputs if o.tokens_per_expert is not None])
        losses_M3 = all_reduce_sum(losses_M3, self._group)
        tokens_M: Sequence[Tensor | None] = [None] * self._micro_batches
        if counts[0]:
            tokens_M = all_reduce_sum(torch.stack([torch.stack(part) for part in counts]).sum(0), self._group).unbind()
        return [
            ModelOutput(None, loss, aux_loss if is_there else None, tokens)
            for (loss, aux_loss, is_there), tokens in zip(losses_M3, tokens_M, strict=True)
        ]

    def _copied_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that the last part copies from the first, known to all ranks of the pipeline."""
        names = [self._parts[-1].copied_parameters]
        dist.broadcast_object_list(names, dist.get_global_rank(self._group, self._last_rank), self._group)
        return names[0]

    @torch.no_grad()
    def _sum_copied_gradients(self) -> None:
        """Gives owner and copy the sum of their gradients, so that they stay equal. Stage 0 is on rank 0."""
        rank = dist.get_rank(self._group)
        for name in self._copied if rank in (0, self._last_rank) else ():
            grads = [grad for part in self._ends(rank) if (grad := part.get_parameter(name).grad) is not None]
            own = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
            if self._last_rank == 0:
                own[0].add_(own[1])
                own[1].copy_(own[0])
            elif own:
                received = torch.empty_like(own[0])
                peer = dist.get_global_rank(self._group, self._last_rank - rank)
                for work in dist.batch_isend_irecv(
                    [
                        dist.P2POp(dist.isend, own[0].contiguous(), peer, self._group),
                        dist.P2POp(dist.irecv, received, peer, self._group),
                    ]
                ):
                    work.wait()
                own[0].add_(received)

    def _ends(self, rank: int) -> list[BaseModel]:
        """The first and the last part of the model, as far as they are on this rank."""
        return [self._parts[0]] * (rank == 0) + [self._parts[-1]] * (rank == self._last_rank)


def _detached(loss: Tensor | None) -> Tensor | None:
    return None if loss is None else loss.detach()
