"""The gradient norm of the whole model, wherever its parameters live."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.distributed.reductions import all_reduce_sum


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float | None,
    *,
    copies: Sequence[nn.Parameter] = (),
    pp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Scales all gradients by ``min(1, max_norm / (norm + 1e-6))``, as `torch.nn.utils.clip_grad_norm_` does.

    Every element of the model counts once: shards are summed over the mesh axes that they are spread over, replicas
    and plain parameters are not. Parameters of several meshes may be mixed. Parameters without a gradient count as 0.

    Args:
        parameters: the same list on every rank of one pipeline stage.
        max_norm: None only measures.
        copies: those of `parameters` that are copies of another stage's: scaled, but counted there.
        pp_group: the ranks of one pipeline, which hold different parameters. None: each rank has all.

    Returns:
        The 2-norm before scaling: a plain scalar, equal on all ranks, in float32 or the parameters' wider type.
    """
    parameters = list(parameters)
    copied = {id(parameter) for parameter in copies}
    # Keyed by the parameters' layout, so that a rank without any gradient still takes part in its sums.
    parts: dict[tuple, list[torch.Tensor]] = defaultdict(list)
    local_grads: list[torch.Tensor] = []
    for parameter in parameters:
        grad = parameter.grad
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None:  # a DTensor, asked without importing it: one process has none
            placements = parameter.placements
            part = parts[mesh, tuple(axis for axis, p in enumerate(placements) if not p.is_replicate())]
            if grad is None:
                continue
            local_grads.append(grad.to_local())
            if id(parameter) in copied:
                continue
            # A gradient may be a partial sum, or whole where the parameter is sharded: count it in the latter's layout.
            part.append(grad.redistribute(placements=placements).to_local())
        elif grad is not None:
            local_grads.append(grad)
            if id(parameter) not in copied:
                parts[None, ()].append(grad)
    if not parts:
        return torch.zeros(())

    device, dtype = parameters[0].device, torch.float32
    for parameter in parameters:
        dtype = torch.promote_types(dtype, parameter.dtype)
    squares = []
    for (mesh, sharded_axes), grads in parts.items():
        square = torch.zeros((), dtype=dtype, device=device)
        for same_kind in _by_device_and_dtype(grads):
            square += torch.linalg.vector_norm(torch.stack(_norms(same_kind))).to(square).square()
        for axis in sharded_axes:
            square = all_reduce_sum(square, mesh.get_group(axis))
        squares.append(square)
    norm = all_reduce_sum(torch.stack(squares).sum(), pp_group).sqrt()

    if max_norm is not None:
        # A norm that is NaN scales nothing: it can still be seen which gradients it comes from.
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).nan_to_num(nan=1.0)
        for same_kind in _by_device_and_dtype(local_grads):
            torch._foreach_mul_(same_kind, scale.to(same_kind[0].device))
    return norm


def _norms(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The 2-norm of each, in float32 or their wider type; all are of one device and dtype."""
    dtype = torch.promote_types(torch.float32, tensors[0].dtype)
    if not tensors[0].is_cpu or tensors[0].dtype == dtype:
        return torch._foreach_norm(tensors, 2, dtype=dtype)
    # Torch's CPU kernel takes twice as long when it has to widen. Over rows it need not: it adds up in float32 and
    # rounds the norm of each row alone, and over many rows these errors cancel out.
    return [
        torch.linalg.vector_norm(torch.linalg.vector_norm(t, dim=-1) if t.dim() > 1 else t, dtype=dtype)
        for t in tensors
    ]


def _by_device_and_dtype(tensors: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device, tensor.dtype].append(tensor)
    return groups.values()
