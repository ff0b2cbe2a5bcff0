"""Which rows of a batch the tokens of a router belong to."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hyper_parallel.protocols.module import Module


class TokensByRow(Module):
    """Sorts what a router of transformers says of its tokens by row: a module, so that it has a boundary of its own."""

    def forward(self, x_NE: torch.Tensor, rows: int) -> torch.Tensor:
        """[B, T, E] of `rows` rows."""
        return x_NE.unflatten(0, (rows, -1))


def tokens_of_ranks_by_row(
    module: TokensByRow, group: dist.ProcessGroup, x_NE: torch.Tensor, rows: int
) -> torch.Tensor:
    """The same where each rank of `group` has a part of every row, and its tokens stand together."""
    return x_NE.unflatten(0, (dist.get_world_size(group), rows, -1)).transpose(0, 1).flatten(1, 2)
