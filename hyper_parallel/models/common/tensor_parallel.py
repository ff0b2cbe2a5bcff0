"""Layers that compute on their part of a matrix what their own forward would not."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hyper_parallel.models.common.embedding import WholeVocabulary
from hyper_parallel.protocols.redistribute import Move, largest_part, redistribute


def vocabulary_parallel_embedding(
    module: nn.Module,
    group: dist.ProcessGroup,
    input_ids_BT: torch.Tensor,
    *,
    vocab_size: int,
    padding_id: int | None = None,
) -> torch.Tensor:
    """[B, T, C]: the vectors of the tokens whose rows are on this rank, 0 for others; the sum over ranks is whole.

    Args:
        module: owns `weight`, this rank's rows of `vocab_size`.
        padding_id: the token whose vector gets no gradient here.
    """
    rows_VC = module.weight
    first_row = dist.get_rank(group) * largest_part(vocab_size, dist.get_world_size(group))
    own_ids_BT = input_ids_BT - first_row
    is_own_BT = (own_ids_BT >= 0) & (own_ids_BT < rows_VC.shape[0])
    vectors_BTC = F.embedding(own_ids_BT.where(is_own_BT, 0), rows_VC)
    if padding_id is not None:
        vectors_BTC = vectors_BTC.where((input_ids_BT != padding_id)[..., None], vectors_BTC.detach())
    return vectors_BTC * is_own_BT[..., None]


def gather_vocabulary(module: WholeVocabulary, group: dist.ProcessGroup, logits_BTV: torch.Tensor) -> torch.Tensor:
    """[B, T, vocab_size] on every rank, from the logits of each rank's own rows of the vocabulary.

    Collectives take parts of one size: shorter ones are padded on the way.
    """
    from torch.distributed.tensor import Replicate, Shard

    vocab_size, last = module.config.vocab_size, logits_BTV.dim() - 1
    missing = largest_part(vocab_size, dist.get_world_size(group)) - logits_BTV.shape[last]
    move = Move(Shard(last), Replicate(), Replicate(), Shard(last))
    return redistribute(F.pad(logits_BTV, (0, missing)), move, group)[..., :vocab_size]


def row_parallel_linear_with_bias(module: nn.Module, group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    """A part of the product; the sum over ranks is whole and holds the bias once."""
    return F.linear(x, module.weight, module.bias * (dist.get_rank(group) == 0))
