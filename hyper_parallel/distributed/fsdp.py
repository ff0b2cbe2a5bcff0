"""Data parallelism by FSDP2: sharded over `dp_shard`, copied over `dp_replicate`, its gradients summed over both.

Gradients are sums, never averages: the loss that is differentiated is already divided by the tokens of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.config.sections import ParallelismConfig, TrainingConfig
from hyper_parallel.distributed.parallel_dims import ParallelDims
from hyper_parallel.protocols.model import BaseModel
from hyper_parallel.protocols.planned_module import PlannedModule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PlaceOf = Callable[[nn.Parameter], Any]
"""The `Shard` by which FSDP splits a parameter. None: by its first dim."""


def fsdp_needed(training: TrainingConfig, parallelism: ParallelismConfig, world_size: int) -> bool:
    """Whether a run goes through FSDP, and so needs a process group even where there is one rank only.

    One process that computes in the type of its parameters is a plain module and pays for nothing. Mixed precision and
    CPU offload have one implementation, FSDP's, for any number of ranks.
    """
    mixed = training.mixed_precision_param not in (None, training.dtype)
    return world_size > 1 or mixed or parallelism.cpu_offload


def apply_fsdp(
    model: BaseModel,
    parallel_dims: ParallelDims,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
    cpu_offload: bool,
) -> None:
    """Shards every block of `model`, and what is left (embedding, last norm, lm_head) with the root, in place.

    Embedding and lm_head share the root's group, so tied weights are one parameter, and lm_head is whole while the
    loss is computed inside the root's forward. Several copies of an unsharded model are the mesh (dp_replicate, 1).
    Experts that are spread over ranks are sharded within their block over a mesh of their own, efsdp. Their gradients
    need no other scale: a rank's experts have seen the tokens of all ep ranks, so the sum over efsdp is that of all.

    Args:
        param_dtype: of gathered parameters and of the floating-point inputs of blocks.
        reduce_dtype: in which gradients are summed over micro-batches and ranks.
        reshard_after_forward: blocks free gathered parameters until their backward; the root keeps its own.
        cpu_offload: shards, gradients and optimizer state live in host memory: materialise the model there.

    Raises:
        RuntimeError: there is no mesh, but several ranks, or mixed precision or offload, which FSDP alone does.
    """
    mesh = parallel_dims.fsdp_mesh
    if mesh is None:
        if parallel_dims.world_size > 1:
            raise RuntimeError(f"{parallel_dims} has no mesh; call init_distributed, then its build_mesh(device_type)")
        own_dtypes = {parameter.dtype for parameter in model.parameters()}
        if cpu_offload or own_dtypes - {param_dtype}:
            raise RuntimeError(
                f"cpu_offload {cpu_offload}, parameters of {sorted(map(str, own_dtypes))} computed in {param_dtype}: "
                "only FSDP does this; call init_distributed(..., even_alone=True) before build_mesh"
            )
        return
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    # Pinned memory needs an accelerator; FSDP's default raises without one.
    offload_policy = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else OffloadPolicy()

    def shard(
        module: nn.Module, mesh: DeviceMesh, reshard: bool, *, cast_inputs: bool, place_of: PlaceOf | None = None
    ) -> None:
        mp_policy = MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=cast_inputs
        )
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard,
            shard_placement_fn=place_of,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
        )
        module.set_gradient_divide_factor(1.0)
        # A plain sum: gloo has no scaling reduction, and a factor would be applied twice on one rank.
        module.set_force_sum_reduction_for_comms(True)

    for block in model.blocks():
        for module in block.modules():
            if isinstance(module, PlannedModule) and module.efsdp_states:
                assert parallel_dims.efsdp_mesh is not None, "experts are spread, so there is a mesh for them"
                places = {module._parameters[name]: place for name, place in module.efsdp_states.items()}
                shard(module, parallel_dims.efsdp_mesh, reshard_after_forward, cast_inputs=True, place_of=places.get)
        shard(block, mesh, reshard_after_forward, cast_inputs=True)
    # Token ids need no cast, and what comes from another stage has its types: sums over tokens are float32.
    shard(model, mesh, False, cast_inputs=False)


def gradient_sync(model_parts: Iterable[nn.Module], *, last: bool) -> None:
    """Tells FSDP, before a forward, whether its backward is the `last` of the optimizer step.

    Only the last one sums gradients over ranks and frees the gathered parameters; those before it add up unsharded
    gradients. So a step communicates gradients once, however many micro-batches it has. Plain modules need no telling.
    """
    if not dist.is_initialized():
        return
    from torch.distributed.fsdp import FSDPModule

    for part in model_parts:
        if isinstance(part, FSDPModule):
            part.set_is_last_backward(last)
            part.set_requires_gradient_sync(last)
            part.set_reshard_after_backward(last)


def reshard(model_parts: Iterable[nn.Module]) -> None:
    """Frees parameters that are still gathered: a forward without a backward, as in validation, leaves those of the
    root so. What is done to their values then would not reach the shards, and numpy must not see memory that FSDP
    frees."""
    if not dist.is_initialized():
        return
    from torch.distributed.fsdp import FSDPModule

    for part in model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
