"""Context parallelism by a ring: keys and values go round the ranks, and each rank attends to what it has just got."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hyper_parallel.distributed.row_parts import RowParts
from hyper_parallel.models.common.context_parallel.block_attention import attend_block, attend_block_backward
from hyper_parallel.models.common.context_parallel.spread_attention import (
    Pairs,
    Segment,
    SpreadAttention,
    grouped,
    overlap,
    segments,
)


class RingAttention(SpreadAttention):
    """Never more than two ranks' keys and values in memory, and the passing on happens during the computing (Liu et
    al. 2023, https://arxiv.org/abs/2310.01889).

    A segment attends to itself causally, and to what its document has before it, on whichever rank, in full. So no
    block needs a mask, and none is computed to be thrown away.
    """

    def __init__(
        self, cu_seqlens: Sequence[int], rows: int, parts: RowParts, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        super().__init__(cu_seqlens, rows, parts, group, device)
        self.rows = rows
        own = list(segments(cu_seqlens, parts, self.rank))
        places = [range(segment.place, segment.place + len(segment.positions)) for segment in own]
        itself = grouped(zip(places, places, strict=True), is_causal=True, device=device)
        self.blocks: list[list[Pairs]] = []
        """Per step: what to attend to of the rank `step` places before this one."""
        for step in range(parts.ranks):
            source = self.source(step)
            blocks = [] if step else itself
            for first, span in _spans_with_places(parts, source):
                runs = _before(own, span, first, parts.tokens(source))
                blocks += grouped(runs, is_causal=False, device=device)
            self.blocks.append(blocks)

    def source(self, step: int) -> int:
        """The rank whose keys and values are here in `step`."""
        return (self.rank - step) % self.parts.ranks

    def attend(self, q_BTHD: torch.Tensor, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor) -> torch.Tensor:
        return _Ring.apply(q_BTHD, k_BTKD, v_BTKD, self)

    def pass_on(self, kv_2NKD: torch.Tensor, step: int) -> _Arriving:
        """Sends what is of the rank of `step` to the next rank, and has what is of that of `step` + 1 sent here."""
        tokens = self.rows * self.parts.tokens(self.source(step + 1))
        arriving = kv_2NKD.new_empty(2, tokens, *kv_2NKD.shape[2:])
        after, before = (dist.get_global_rank(self.group, (self.rank + way) % self.parts.ranks) for way in (1, -1))
        send = dist.P2POp(dist.isend, kv_2NKD, after, self.group)
        receive = dist.P2POp(dist.irecv, arriving, before, self.group)
        return _Arriving(arriving, dist.batch_isend_irecv([send, receive]), kv_2NKD)


class _Arriving(NamedTuple):
    """A tensor on its way."""

    tensor: torch.Tensor
    works: list[dist.Work]
    sent: torch.Tensor
    """What goes the other way: it must live until it has gone."""

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.tensor


def _spans_with_places(parts: RowParts, rank: int) -> Iterator[tuple[int, range]]:
    """The spans of `rank`, each with the place of its first token in the rank's part of a row."""
    first = 0
    for span in parts.spans(rank):
        yield first, span
        first += len(span)


def _before(own: Sequence[Segment], span: range, first: int, row_tokens: int) -> Iterator[tuple[range, range]]:
    """(query places, key places) of what each own segment's document has before it in `span`, whose first token is
    number `first` of the `row_tokens` that its rank holds of a row."""
    for segment in own:
        if seen := overlap(range(segment.document, segment.positions.start), span):
            place = segment.row * row_tokens + first + seen.start - span.start
            yield range(segment.place, segment.place + len(segment.positions)), range(place, place + len(seen))


class _Ring(torch.autograd.Function):
    """Both passes go once round. Backward computes each block's probabilities again from the log-sum-exp of all."""

    @staticmethod
    def forward(
        ctx: Any, q_BTHD: torch.Tensor, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor, ring: RingAttention
    ) -> torch.Tensor:
        q = q_BTHD.flatten(0, 1)
        own_kv = kv = torch.stack((k_BTKD.flatten(0, 1), v_BTKD.flatten(0, 1)))
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_zeros(q.shape, dtype=wide), q.new_full(q.shape[:2], -torch.inf, dtype=wide)
        for step, blocks in enumerate(ring.blocks):
            arriving = ring.pass_on(kv, step) if step + 1 < len(ring.blocks) else None
            for pairs in blocks:
                rows = pairs.queries.flatten()
                block_out, block_lse = attend_block(q[pairs.queries], *kv[:, pairs.keys], is_causal=pairs.is_causal)
                _merge(out, lse, rows, block_out.flatten(0, 1), block_lse.flatten(0, 1))
            kv = arriving.wait() if arriving is not None else kv
        out_BTHD = out.to(q.dtype).view_as(q_BTHD)
        ctx.ring = ring
        ctx.save_for_backward(q, own_kv, out_BTHD, lse)
        return out_BTHD

    @staticmethod
    def backward(ctx: Any, grad_BTHD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ring, (q, kv, out_BTHD, lse) = ctx.ring, ctx.saved_tensors
        wide = lse.dtype
        grad = grad_BTHD.flatten(0, 1)
        along = (grad.to(wide) * out_BTHD.flatten(0, 1)).sum(-1)
        grad_q = torch.zeros_like(q, dtype=wide)
        returning = None
        for step, blocks in enumerate(ring.blocks):
            arriving = ring.pass_on(kv, step) if step + 1 < len(ring.blocks) else None
            grad_kv = torch.zeros_like(kv, dtype=wide)
            for queries, keys, is_causal in blocks:
                grads = attend_block_backward(
                    grad[queries], q[queries], *kv[:, keys], lse[queries], along[queries], is_causal=is_causal
                )
                grad_q.index_add_(0, queries.flatten(), grads[0].flatten(0, 1))
                for part, block_grad in zip(grad_kv, grads[1:], strict=True):
                    part.index_add_(0, keys.flatten(), block_grad.flatten(0, 1))
            if returning is not None:
                grad_kv += returning.wait()
            returning = ring.pass_on(grad_kv, step)
            kv = arriving.wait() if arriving is not None else kv
        assert returning is not None, "a ring has ranks"
        shape = (len(grad_BTHD), -1, *kv.shape[2:])
        grad_k, grad_v = (g.to(q.dtype).view(shape) for g in returning.wait())
        return grad_q.to(q.dtype).view_as(grad_BTHD), grad_k, grad_v, None


def _merge(
    out: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, block_out: torch.Tensor, block_lse: torch.Tensor
) -> None:
    """Takes attention to further keys, of the queries `rows`, into `out` [N, H, D] and log-sum-exp `lse` [N, H].

    Each weighs with its share of the sum of exponentials (Dao et al. 2022, https://arxiv.org/abs/2205.14135)."""
    so_far = lse[rows]
    together = torch.logaddexp(so_far, block_lse)
    share, block_share = (so_far - together).exp_(), (block_lse - together).exp_()
    out[rows] = out[rows] * share[..., None] + block_out * block_share[..., None]
    lse[rows] = together
