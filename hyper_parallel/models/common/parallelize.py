"""How a decoder is made ready for its ranks: one function for every family, called before it is materialised."""

from __future__ import annotations

import torch

from hyper_parallel.config.sections import (
    ActivationCheckpointConfig,
    CompileConfig,
    ParallelismConfig,
    TrainingConfig,
)
from hyper_parallel.distributed.activation_checkpoint import apply_activation_checkpoint
from hyper_parallel.distributed.compile import apply_compile
from hyper_parallel.distributed.fsdp import apply_fsdp
from hyper_parallel.distributed.parallel_dims import ParallelDims
from hyper_parallel.protocols.model import BaseModel


def parallelize_decoder(
    model: BaseModel,
    parallel_dims: ParallelDims,
    *,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    activation_checkpoint: ActivationCheckpointConfig,
    compile: CompileConfig,
    dump_folder: str,
) -> BaseModel:
    """Applies its sharding plan, compile, recompute and FSDP to `model`, in place and in this order: a graph holds the
    plan's collectives, the backward pass runs it again, and FSDP's gathering happens around both.

    Args:
        model: on meta or materialised, parameters of `training.dtype`.
        parallel_dims: with its mesh built.
        dump_folder: unused by this plan; part of the signature of every `ModelSpec.parallelize_fn`.
    """
    model.parallelize(parallel_dims, parallelism.mode)
    apply_compile(model, compile, activation_checkpoint.memory_budget)
    apply_activation_checkpoint(model, activation_checkpoint)
    apply_fsdp(
        model,
        parallel_dims,
        param_dtype=getattr(torch, training.mixed_precision_param or training.dtype),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce or training.dtype),
        reshard_after_forward=parallelism.reshards(),
        cpu_offload=parallelism.cpu_offload,
    )
    return model
