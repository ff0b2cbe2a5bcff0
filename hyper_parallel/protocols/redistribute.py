"""Moves local tensors from one placement to another over one mesh axis, and their gradients back."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from hyper_parallel.protocols.collectives import all_gather, all_reduce, reduce_scatter
from hyper_parallel.protocols.sharding import Placement


class Move(NamedTuple):
    """A change of placement, and that of the gradient on its way back."""

    src: Placement
    """How the tensor is laid out."""
    dst: Placement
    """How it shall be."""
    grad_src: Placement
    """How the gradient of the moved tensor arrives."""
    grad_dst: Placement
    """How the gradient of the tensor shall be."""

    @property
    def moves_nothing(self) -> bool:
        """Whether both the tensor and its gradient stay where they are."""
        return bool(self.src == self.dst and self.grad_src == self.grad_dst)


def largest_part(size: int, ranks: int) -> int:
    """Of a dim of `size` elements that is split over ranks as `Shard` does it: rank r has those from r times this on,
    up to as many as this. The last ranks have fewer where it does not divide."""
    return -(-size // ranks)


def redistribute(x: torch.Tensor, move: Move, group: dist.ProcessGroup) -> torch.Tensor:
    """`x`, this rank's part, laid out as `move.dst` over the ranks of `group`. Dims must divide by their number."""
    if move.moves_nothing:
        return x
    moved: torch.Tensor = _Redistribute.apply(x, move, group)
    return moved


class _Redistribute(torch.autograd.Function):
    """One collective forward and one back: all-gather and reduce-scatter, or copy and all-reduce, or the reverse."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, move: Move, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.move, ctx.group = move, group
        moved = change(x, move.src, move.dst, group)
        return moved.view_as(moved) if moved is x else moved

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return change(grad, ctx.move.grad_src, ctx.move.grad_dst, ctx.group), None, None


def collective(src: Placement, dst: Placement) -> Literal["all-gather", "all-reduce", "reduce-scatter", "cut", None]:
    """What changes `src` to `dst`; "cut": each rank takes its part of what it has. None: nothing needs to, or can."""
    if src.is_shard() and dst.is_replicate():
        return "all-gather"
    if src.is_partial() and dst.is_replicate():
        return "all-reduce"
    if src.is_partial() and dst.is_shard():
        return "reduce-scatter"
    return "cut" if src.is_replicate() and dst.is_shard() else None


def change(x: torch.Tensor, src: Placement, dst: Placement, group: dist.ProcessGroup) -> torch.Tensor:
    """`x` changed from `src` to `dst`, without autograd; `x` itself where they are equal.

    Raises:
        ValueError: no collective does this, or the dim to shard does not divide by the ranks.
    """
    if src == dst:
        return x
    match collective(src, dst):
        case "all-gather":
            return _all_gather(x, src.dim, group)
        case "all-reduce":
            return all_reduce(x, group)
        case "reduce-scatter":
            return _reduce_scatter(x, dst.dim, group)
        case "cut":
            return _split(x, dst.dim, group)[dist.get_rank(group)].contiguous()
    raise ValueError(f"a tensor of shape {tuple(x.shape)} cannot be moved from {src} to {dst}")


def _all_gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    gathered = all_gather(x, group)
    return torch.cat(gathered.chunk(group.size()), dim) if dim else gathered


def _reduce_scatter(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    return reduce_scatter(torch.cat(_split(x, dim, group)), group)


def _split(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    ranks = dist.get_world_size(group)
    if x.shape[dim] % ranks:
        raise ValueError(f"dim {dim} of a tensor of shape {tuple(x.shape)} does not divide by {ranks} ranks")
    return x.chunk(ranks, dim)
