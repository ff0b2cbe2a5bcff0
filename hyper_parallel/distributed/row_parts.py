"""Which tokens of a row each context-parallel rank holds, and how parts become whole rows again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hyper_parallel.protocols.redistribute import Move, redistribute


@dataclass(frozen=True, slots=True)
class RowParts:
    """Every row is cut into 2 x `ranks` chunks, of which rank r holds chunk r and, counted from the end, chunk r.

    In causal attention a late token costs more than an early one; one chunk of each end gives every rank the same work
    (Dubey et al. 2024, https://arxiv.org/abs/2407.21783, section 3.3.2). Chunks differ by one `unit` where the row does
    not divide, so that no row needs padding.
    """

    row_tokens: int
    """Tokens of a whole row."""
    ranks: int
    """Ranks that share the row."""
    unit: int = 1
    """Each chunk is a multiple of this, which divides `row_tokens`."""

    def spans(self, rank: int) -> list[range]:
        """Positions in the row that `rank` holds, as ranges that rise and do not touch."""
        chunks = 2 * self.ranks
        small, larger = divmod(self.row_tokens // self.unit, chunks)
        sizes = ((small + (chunk < larger)) * self.unit for chunk in range(chunks))
        bounds = list(pairwise(accumulate(sizes, initial=0)))
        (first, end), (begin, last) = bounds[rank], bounds[chunks - 1 - rank]
        if end == begin:
            return [range(first, last)]
        return [span for span in (range(first, end), range(begin, last)) if span]

    def tokens(self, rank: int) -> int:
        """Tokens of each row that `rank` holds."""
        return sum(map(len, self.spans(rank)))

    def positions(self, rank: int, device: torch.device) -> torch.Tensor:
        """int64 [tokens(rank)]: where in the row this rank's tokens stand, rising."""
        return torch.cat([torch.arange(span.start, span.stop) for span in self.spans(rank)]).to(device)

    def joined_positions(self, device: torch.device) -> torch.Tensor:
        """int64 [row_tokens]: where in the row the tokens stand when the parts of all ranks lie one after another."""
        return torch.cat([self.positions(rank, device) for rank in range(self.ranks)])


def gather_rows(x_BT: torch.Tensor, parts: RowParts, group: dist.ProcessGroup) -> torch.Tensor:
    """Whole rows [B, row_tokens, ...] from this rank's part of them [B, T, ...].

    A rank's gradient of the whole rows is its own share: those of all ranks are summed on the way back.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    longest = max(parts.tokens(rank) for rank in range(parts.ranks))
    rest = [0, 0] * (x_BT.dim() - 2)
    padded = F.pad(x_BT, (*rest, 0, longest - x_BT.shape[1]))  # collectives take parts of one size
    joined = redistribute(padded, Move(Shard(1), Replicate(), Partial(), Shard(1)), group)
    return joined.index_select(1, _places(parts, longest, x_BT.device))


@lru_cache(maxsize=16)  # every layer asks for them
def _places(parts: RowParts, length: int, device: torch.device) -> torch.Tensor:
    """int64 [row_tokens]: where each token of a row stands when parts, each padded to `length`, are joined."""
    held = [torch.arange(parts.tokens(rank)) + rank * length for rank in range(parts.ranks)]
    order = parts.joined_positions(torch.device("cpu")).argsort()
    return torch.cat(held).index_select(0, order).to(device)
