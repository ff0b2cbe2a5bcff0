"""Context parallelism by Ulysses: for the time of the attention, ranks hold some heads of whole rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.distributed.row_parts import RowParts
from hyper_parallel.models.common.attention import document_attention
from hyper_parallel.models.common.context_parallel.spread_attention import SpreadAttention
from hyper_parallel.models.common.documents import document_groups
from hyper_parallel.protocols.collectives import all_to_all


class UlyssesAttention(SpreadAttention):
    """Two exchanges each way, of which each moves a rank's own share only, and the attention of one process between
    them (Jacobs et al. 2023, https://arxiv.org/abs/2309.14509). Query heads must divide by the ranks."""

    def __init__(
        self, cu_seqlens: Sequence[int], rows: int, parts: RowParts, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        super().__init__(cu_seqlens, rows, parts, group, device)
        self.documents = document_groups(cu_seqlens, rows, parts.row_tokens, device)
        self.joined = parts.joined_positions(device)
        self.in_row_order = self.joined.argsort()

    def attend(self, q_BTHD: torch.Tensor, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor) -> torch.Tensor:
        # With fewer key heads than ranks several ranks need the same one: it is repeated as often as that takes.
        kv_heads = k_BTKD.shape[2]
        copies = math.lcm(kv_heads, self.parts.ranks) // kv_heads
        k, v = (x.repeat_interleave(copies, 2) if copies > 1 else x for x in (k_BTKD, v_BTKD))
        q, k, v = (_Exchange.apply(x, self, True) for x in (q_BTHD, k, v))
        return _Exchange.apply(document_attention(q, k, v, self.documents), self, False)

    def rows_of_some_heads(self, x_BTHD: torch.Tensor) -> torch.Tensor:
        """[B, row_tokens, H / ranks, D] from [B, T, H, D]."""
        rows, _, heads, size = x_BTHD.shape
        ranks = self.parts.ranks
        lengths = [rows * self.parts.tokens(rank) * (heads // ranks) * size for rank in range(ranks)]
        sent = x_BTHD.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4).flatten()
        received = all_to_all(sent, lengths, [sent.numel() // ranks] * ranks, self.group)
        parts = [part.view(rows, -1, heads // ranks, size) for part in received.split(lengths)]
        return torch.cat(parts, 1).index_select(1, self.in_row_order)

    def tokens_of_all_heads(self, x_BThD: torch.Tensor) -> torch.Tensor:
        """[B, T, H, D] from [B, row_tokens, H / ranks, D]."""
        rows, _, heads, size = x_BThD.shape
        ranks = self.parts.ranks
        tokens = [self.parts.tokens(rank) for rank in range(ranks)]
        parts = x_BThD.index_select(1, self.joined).split(tokens, 1)
        sent = torch.cat([part.flatten() for part in parts])
        own = rows * tokens[self.rank] * heads * size
        received = all_to_all(sent, [own] * ranks, [part.numel() for part in parts], self.group)
        return received.view(ranks, rows, tokens[self.rank], heads, size).permute(1, 2, 0, 3, 4).flatten(2, 3)


class _Exchange(torch.autograd.Function):
    """From tokens to heads, or back; its gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, spread: UlyssesAttention, to_heads: bool) -> torch.Tensor:
        ctx.spread, ctx.to_heads = spread, to_heads
        return spread.rows_of_some_heads(x) if to_heads else spread.tokens_of_all_heads(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        spread = ctx.spread
        return spread.tokens_of_all_heads(grad) if ctx.to_heads else spread.rows_of_some_heads(grad), None, None
