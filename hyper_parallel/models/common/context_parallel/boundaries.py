"""What the modules of a decoder do in the place of their own forward where ranks share rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hyper_parallel.distributed.reductions import all_reduce_sum
from hyper_parallel.distributed.row_parts import RowParts, gather_rows
from hyper_parallel.models.common.attention import HeadAttention
from hyper_parallel.models.common.context_parallel.spread_attention import SpreadAttention
from hyper_parallel.models.common.documents import Rows, WholeRows, check_boundaries, document_positions
from hyper_parallel.models.common.rope import RopeTables, apply_rope

if TYPE_CHECKING:
    from hyper_parallel.models.common.decoder import Output


def own_part_of_rows(
    module: WholeRows,
    group: dist.ProcessGroup,
    input_ids_BT: torch.Tensor,
    position_ids_BT: torch.Tensor | None,
    cu_seqlens: Sequence[int] | None,
    labels_BT: torch.Tensor | None,
    *,
    attention: type[SpreadAttention],
    unit: int,
) -> Rows:
    """This rank's tokens of whole rows, which every rank of `group` has. `unit`: see RowParts."""
    (rows, tokens), device = input_ids_BT.shape, input_ids_BT.device
    if cu_seqlens is None:
        cu_seqlens = range(0, rows * tokens + 1, tokens)
    check_boundaries(cu_seqlens, rows, tokens)
    if position_ids_BT is None:
        position_ids_BT = document_positions(cu_seqlens, rows, tokens, device)
    parts = RowParts(tokens, dist.get_world_size(group), unit)
    held_T = parts.positions(dist.get_rank(group), device)
    return Rows(
        input_ids_BT.index_select(1, held_T),
        position_ids_BT.index_select(1, held_T),
        None if labels_BT is None else labels_BT.index_select(1, held_T),
        attention(cu_seqlens, rows, parts, group, device),
        tokens,
    )


def spread_head_attention(
    module: HeadAttention,
    group: dist.ProcessGroup,
    q_BTHD: torch.Tensor,
    k_BTKD: torch.Tensor,
    v_BTKD: torch.Tensor,
    rope: RopeTables | None,
    documents: SpreadAttention,
) -> torch.Tensor:
    """[B, T, H, D] of this rank's tokens."""
    if rope is not None:
        q_BTHD, k_BTKD = apply_rope(q_BTHD, rope), apply_rope(k_BTKD, rope)
    return module.attend_eagerly(documents.attend, q_BTHD, k_BTKD, v_BTKD)


def output_of_whole_rows(
    module: Output,
    group: dist.ProcessGroup,
    hidden_BTC: torch.Tensor,
    function: Callable[[torch.Tensor], torch.Tensor],
    *,
    unit: int,
) -> torch.Tensor:
    """What `function` makes of the whole rows, on every rank. `unit`: see RowParts."""
    row_tokens = int(all_reduce_sum(torch.tensor(hidden_BTC.shape[1], device=hidden_BTC.device), group))
    return function(gather_rows(hidden_BTC, RowParts(row_tokens, dist.get_world_size(group), unit), group))
