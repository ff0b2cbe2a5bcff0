"""Attention over rows spread over ranks, against one process: outputs and gradients, float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from hyper_parallel.distributed.row_parts import RowParts
from hyper_parallel.models.common.context_parallel import ATTENTIONS
from hyper_parallel.models.common.context_parallel.block_attention import attend_block
from tests.distributed_world import run_world

TOLERANCE = 1e-13
Sizes = tuple[int, int, list[int]]
"""Rows, tokens of a row, ends of documents over all rows."""

ROWS: dict[str, Sizes] = {
    "whole rows": (2, 32, [32, 64]),
    "documents across chunk borders": (2, 32, [3, 21, 32, 33, 50, 63, 64]),
    "one long and many single": (2, 32, [30, 31, 32, 33, 34, 35, 64]),
    "row that does not divide": (2, 29, [7, 29, 29 + 28, 58]),
    "fewer tokens than chunks": (3, 5, [5, 7, 10, 15]),
}
HEADS = {"every head its own": (8, 8), "grouped": (8, 2), "one for all": (8, 1)}


def expected(q: Any, k: Any, v: Any, ends: list[int]) -> torch.Tensor:
    """SDPA of torch under a dense mask of documents."""
    rows, tokens = q.shape[:2]
    document = torch.bucketize(torch.arange(rows * tokens), torch.tensor(ends), right=True).view(rows, tokens)
    mask = (document[:, :, None] == document[:, None, :]) & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=True).transpose(1, 2)


def compare(sizes: Sizes, heads: tuple[int, int], method: str) -> list[float]:
    """Largest differences of the output and of the gradients of q, k and v, on this rank."""
    (rows, tokens, ends), (q_heads, kv_heads) = sizes, heads
    torch.manual_seed(0)
    q, k, v, weight = (
        torch.randn(rows, tokens, h, 4, dtype=torch.float64, requires_grad=True)
        for h in (q_heads, kv_heads, kv_heads, q_heads)
    )
    whole = expected(q, k, v, ends)
    grads = torch.autograd.grad((whole * weight).sum(), (q, k, v))
    parts, device = RowParts(tokens, dist.get_world_size()), torch.device("cpu")
    held = parts.positions(dist.get_rank(), device)
    attention = ATTENTIONS[method]([0, *ends], rows, parts, dist.group.WORLD, device)
    own = [x.detach()[:, held].requires_grad_() for x in (q, k, v)]
    out = attention.attend(*own)
    own_grads = torch.autograd.grad((out * weight[:, held]).sum(), own)
    return [float((a - b[:, held]).abs().max()) for a, b in zip((out, *own_grads), (whole, *grads), strict=True)]


def run_cases() -> dict[str, list[float]]:
    return {
        f"{method}, {rows}, {heads}": compare(sizes, counts, method)
        for method in ATTENTIONS
        for rows, sizes in ROWS.items()
        for heads, counts in HEADS.items()
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_outputs_and_gradients_are_those_of_one_process(ranks: int) -> None:
    for differences in run_world(ranks, run_cases):
        assert len(differences) == len(ATTENTIONS) * len(ROWS) * len(HEADS)
        wrong = {case: worst for case, worst in differences.items() if max(worst) > TOLERANCE}
        assert not wrong


@pytest.mark.parametrize("is_causal", [True, False])
def test_blocks_of_more_queries_than_a_tile(is_causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 600, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    out, lse = attend_block(q, k, v, is_causal=is_causal)
    reference = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=is_causal, enable_gqa=True
    )
    assert torch.allclose(out, reference.transpose(1, 2), rtol=0, atol=TOLERANCE)
    scores = torch.einsum("nqhd,nthd->nqht", q, k.repeat_interleave(2, 2)) / 2
    if is_causal:
        scores += torch.full((600, 600), -torch.inf, dtype=q.dtype).triu(1)[:, None]
    assert torch.allclose(lse, scores.logsumexp(-1), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("row_tokens", "ranks", "unit"), [(32, 4, 1), (29, 4, 1), (5, 4, 1), (4, 4, 1), (30, 3, 2), (26, 4, 2)]
)
def test_parts_hold_every_token_once_and_nearly_alike(row_tokens: int, ranks: int, unit: int) -> None:
    parts = RowParts(row_tokens, ranks, unit)
    joined = parts.joined_positions(torch.device("cpu"))
    assert sorted(joined.tolist()) == list(range(row_tokens))
    tokens = [parts.tokens(rank) for rank in range(ranks)]
    assert max(tokens) - min(tokens) <= 2 * unit and min(tokens) > 0
    assert all(len(span) % unit == 0 for rank in range(ranks) for span in parts.spans(rank))


def test_zig_zag_gives_every_rank_the_same_work() -> None:
    parts = RowParts(64, 4)
    assert parts.spans(1) == [range(8, 16), range(48, 56)]
    assert parts.spans(3) == [range(24, 40)]
    seen = [sum(position + 1 for span in parts.spans(rank) for position in span) for rank in range(4)]
    assert seen == [64 * 65 // 2 // 4] * 4
