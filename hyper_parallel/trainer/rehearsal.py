"""Rehearsal: one rank of a run of any size, built and run for a step in one process, on tensors without memory.

Importing this file costs as much as torch itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyper_parallel.config.errors import RunError
from hyper_parallel.config.sections import CompileConfig
from hyper_parallel.distributed.parallel_dims import ParallelDims
from hyper_parallel.distributed.process_group import join_fake, leave_fake
from hyper_parallel.distributed.traffic import Flow, Moved, Traffic
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer import phases
from hyper_parallel.trainer.base import BaseTrainer
from hyper_parallel.trainer.callbacks import CallbackHandler, TrainerState
from hyper_parallel.trainer.config import DEFAULT_STEPS, TrainerConfig


@contextmanager
def fake_world(rank: int, ranks: int) -> Iterator[None]:
    """This process is `rank` of `ranks`, of which no other exists."""
    join_fake(rank, ranks)
    try:
        yield
    finally:
        leave_fake()


class UnknownNumberError(RunError):
    """A rehearsal has no values, and a run would decide by one what it communicates."""


class UnknownModelError(RunError):
    """A rehearsal has nothing to construct."""


class Rehearsal(BaseTrainer):
    """The trainer of a run as far as a step needs it. Made and used within `fake_world`."""

    def __init__(self, config: TrainerConfig, copied_parameters: tuple[str, ...] = ()) -> None:
        """`copied_parameters`: those of the last part of a pipeline, which the last rank would tell the others."""
        self.config = config = config.derive(compile=CompileConfig()).described()  # a graph has the same collectives
        self.parallel_dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
        if phases.needs_process_group(config, dist.get_world_size()):  # else the model stays a plain module
            self.parallel_dims.build_mesh(get_platform().device_type)
        self.training_steps = config.training.steps or DEFAULT_STEPS
        self.state = TrainerState(max_steps=self.training_steps)
        model_config = phases.prepare_model_config(config)
        if model_config is None:
            raise UnknownModelError(
                "the model's spec has no model Config: its build_model_fn alone knows what it builds"
            )
        self.model_config = model_config
        self.model = phases.construct_model(config, self.model_config)
        self.model_parts = phases.parallelize(config, self.model, self.parallel_dims)
        self.finite_guard = None
        self.callbacks = CallbackHandler([])
        idle = SimpleNamespace(finish=dict, take_figures=dict, wait_copied=dict)  # a step saves nothing
        self.checkpointer = idle  # type: ignore[assignment]
        with _without_values():
            for part in self.model_parts:
                part.to_empty(device=get_platform().device())
                part.train()
            self.optimizers = phases.build_optimizers(config, self.model_parts, self.parallel_dims)
            self.lr_schedulers = phases.build_lr_schedulers(config, self.optimizers, self.training_steps)
            self.clip_grad_fn = phases.choose_clip_grad_fn(config, self.model_parts, self.parallel_dims)
            self.loss = phases.build_loss(config, self.model_parts, self.parallel_dims)
            with patch.object(dist, "broadcast_object_list", _telling(copied_parameters)):
                self.forward_backward = phases.build_forward_backward(
                    config, self.model_parts, self.parallel_dims, self.loss, self.get_batch
                )

    def step(self) -> dict[Flow, Moved]:
        """What this rank's collectives move in an optimizer step; experts get equal shares of the tokens.

        Raises:
            UnknownNumberError: that depends on values.
        """
        training = self.config.training
        shape = training.micro_batch_size, training.seq_len
        micro_batch = {
            "input_ids": torch.zeros(shape, dtype=torch.int64),
            "labels": torch.zeros(shape, dtype=torch.int64),
            "position_ids": torch.arange(training.seq_len).expand(shape),
            "cu_seqlens": list(range(0, shape[0] * shape[1] + 1, shape[1])),
        }
        count = training.global_batch_size // (training.micro_batch_size * self.parallel_dims.dp_size)
        with _without_values(), _agreed_stages(self.parallel_dims.pp), Traffic() as traffic:
            self.train_step(iter([[micro_batch] * count]))
        return dict(traffic.flows)


class _Values(TorchDispatchMode):
    """Beside fake tensors: what the host knows, and all that is computed from it alone, is real."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_counting = func.overloadpacket is torch.ops.aten.arange
        if (tensors or is_counting) and not any(isinstance(t, FakeTensor) or t.is_meta for t in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            if not args[0].is_floating_point():
                raise UnknownNumberError("what this run communicates depends on values that a rehearsal has not")
            return 1.0  # a loss or a norm, which is but reported
        return func(*args, **kwargs)


@contextmanager
def _without_values() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True), _Values():
        yield


@contextmanager
def _agreed_stages(pp: int) -> Iterator[None]:
    """In the first step of a run stages vote whether all of them know their shapes, as ours do; it is left out."""
    if pp == 1:
        yield
        return
    from torch.distributed.pipelining import PipelineStage

    def agreed(*_: Any, **__: Any) -> torch.Tensor:
        return torch.arange(1, 2)

    with patch.multiple(PipelineStage, _warmup_forward_vote=agreed, _warmup_backward_result=agreed):
        yield


def _telling(names: Sequence[str]) -> Any:
    def tell(objects: list[Any], *_: Any) -> None:
        objects[0] = objects[0] or names

    return tell
