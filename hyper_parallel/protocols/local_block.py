"""The block of a parameter that this rank holds: of a sharded one its shard, of any other the whole."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LocalBlock(NamedTuple):
    """A box of a parameter."""

    tensor: torch.Tensor
    """Its elements, sharing the parameter's memory."""
    offset: tuple[int, ...]
    """Where it starts in the whole parameter, per dim."""


def local_block(parameter: torch.Tensor) -> LocalBlock:
    """The block of `parameter` on this rank; of a DTensor whose mesh lacks this rank, an empty one."""
    if not hasattr(parameter, "to_local"):
        return LocalBlock(parameter, (0,) * parameter.dim())
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(parameter, DTensor)
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return LocalBlock(parameter.to_local(), tuple(offset))
