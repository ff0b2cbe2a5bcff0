"""Layers that compute on their part of a matrix what their own forward would not."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hyper_parallel.models.common.embedding import Embedding
from hyper_parallel.models.common.linear import Linear


def vocabulary_parallel_embedding(
    module: Embedding, group: dist.ProcessGroup, input_ids_BT: torch.Tensor
) -> torch.Tensor:
    """[B, T, C]: the vectors of the tokens whose rows are on this rank, 0 for others; the sum over ranks is whole."""
    rows_VC = module.weight
    own_ids_BT = input_ids_BT - dist.get_rank(group) * rows_VC.shape[0]
    is_own_BT = (own_ids_BT >= 0) & (own_ids_BT < rows_VC.shape[0])
    return F.embedding(own_ids_BT.where(is_own_BT, 0), rows_VC) * is_own_BT[..., None]


def row_parallel_linear_with_bias(module: Linear, group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    """A part of the product; the sum over ranks is whole and holds the bias once."""
    return F.linear(x, module.weight, module.bias * (dist.get_rank(group) == 0))
