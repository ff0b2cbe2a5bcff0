"""Collectives whose result is what they return: a graph can hold them, and selective recompute can keep it.

Those of torch.distributed write into a buffer that they are given. A recomputed forward would make that buffer anew and
find nothing in it, and a compiled graph would have the process group itself as an argument.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

_ops = torch.ops._c10d_functional


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of `x` over the ranks of `group`."""
    return _waited(_ops.all_reduce(x.contiguous(), "sum", group.group_name))


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The `x` of all ranks, one behind the other in the first dim."""
    return _waited(_ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Of the sum of `x` over the ranks, this rank's part of the first dim, which must divide by them."""
    return _waited(_ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size(), group.group_name))


def all_to_all(x: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """What the ranks sent to this one, in their order: `received[r]` rows from rank r for the `sent[r]` rows of `x`
    that go to it."""
    return _waited(_ops.all_to_all_single(x.contiguous(), list(received), list(sent), group.group_name))


def _waited(x: torch.Tensor) -> torch.Tensor:
    done: torch.Tensor = _ops.wait_tensor(x)
    return done
