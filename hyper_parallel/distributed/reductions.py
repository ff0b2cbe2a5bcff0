"""Reductions of small tensors over ranks. A group of None is one process: the value itself."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

ObjectT = TypeVar("ObjectT")


def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The sum of `tensor` (any shape) over the ranks of `group`, as a new tensor."""
    return _all_reduce(tensor, dist.ReduceOp.SUM, group) if group is not None else tensor


def all_reduce_max(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The element-wise maximum of `tensor` (any shape) over the ranks of `group`, as a new tensor."""
    return _all_reduce(tensor, dist.ReduceOp.MAX, group) if group is not None else tensor


def all_gather_object(value: ObjectT) -> list[ObjectT]:
    """`value` of every rank of the process group, by rank; pickled, so for rare moments."""
    if not dist.is_initialized():
        return [value]
    values: list[ObjectT] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> torch.Tensor:
    reduced = tensor.detach().clone()
    dist.all_reduce(reduced, op, group)
    return reduced
