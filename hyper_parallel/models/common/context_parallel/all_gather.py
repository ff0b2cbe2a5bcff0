"""Context parallelism by all-gather: every rank has all keys and values, and the queries of its own tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hyper_parallel.distributed.row_parts import RowParts, gather_rows
from hyper_parallel.models.common.context_parallel.spread_attention import SpreadAttention, grouped, segments


class AllGatherAttention(SpreadAttention):
    """One collective each way and the fewest kernels; keys and values of whole rows are in memory in every layer
    (Dubey et al. 2024, https://arxiv.org/abs/2407.21783, section 3.3.2)."""

    def __init__(
        self, cu_seqlens: Sequence[int], rows: int, parts: RowParts, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        super().__init__(cu_seqlens, rows, parts, group, device)
        runs = []
        for segment in segments(cu_seqlens, parts, self.rank):
            queries = range(segment.place, segment.place + len(segment.positions))
            row_start = segment.row * parts.row_tokens
            runs.append((queries, range(row_start + segment.document, row_start + segment.positions.stop)))
        self._pairs = grouped(runs, is_causal=True, device=device)
        # The order in which the pairs, one after the other, are the rank's tokens again.
        self._order = torch.cat([pairs.queries.flatten() for pairs in self._pairs]).argsort()

    def attend(self, q_BTHD: torch.Tensor, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor) -> torch.Tensor:
        kv_NKE = gather_rows(torch.cat((k_BTKD, v_BTKD), -1), self.parts, self.group).flatten(0, 1)
        q_NHD = q_BTHD.flatten(0, 1)
        outputs = []
        for queries, keys, _ in self._pairs:
            q = _taken(q_NHD, queries)
            k, v = _taken(kv_NKE, keys).chunk(2, -1)
            outputs.append(_attend_to_the_end(q, k, v).transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self._order).view_as(q_BTHD)


def _taken(x_NHD: torch.Tensor, places_nT: torch.Tensor) -> torch.Tensor:
    """[n, H, T, D]"""
    return x_NHD.index_select(0, places_nT.flatten()).unflatten(0, places_nT.shape).transpose(1, 2)


def _attend_to_the_end(q_nHQD: torch.Tensor, k_nKTD: torch.Tensor, v_nKTD: torch.Tensor) -> torch.Tensor:
    """[n, H, Q, D] attention of the last Q of T tokens to those up to their own."""
    queries, tokens = q_nHQD.shape[2], k_nKTD.shape[2]
    mask_QT = None
    if queries < tokens:
        mask_QT = torch.ones(queries, tokens, dtype=torch.bool, device=q_nHQD.device).tril(tokens - queries)
    is_grouped = q_nHQD.shape[1] != k_nKTD.shape[1]
    return F.scaled_dot_product_attention(
        q_nHQD, k_nKTD, v_nKTD, attn_mask=mask_QT, is_causal=mask_QT is None, enable_gqa=is_grouped
    )
