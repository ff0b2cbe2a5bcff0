"""Attention over rows whose tokens are spread over ranks: what its implementations have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from hyper_parallel.config.errors import RunError
from hyper_parallel.distributed.row_parts import RowParts


class OwnTokensError(RunError):
    """An attention of the user's sees the tokens of one rank of cp alone."""

    def __init__(self, module: str, fact: str, remedy: str) -> None:
        super().__init__(f"{module} {fact}, so each rank of cp sees its own tokens alone; {remedy}")


class SpreadAttention(ABC):
    """Causal attention within documents, each rank holding a part of every row. One object serves a batch's layers."""

    def __init__(
        self, cu_seqlens: Sequence[int], rows: int, parts: RowParts, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """
        Args:
            cu_seqlens: document boundaries over the flattened whole rows.
            parts: which of each row's tokens are on which rank of `group`.
        """
        self.parts, self.group, self.rank = parts, group, dist.get_rank(group)

    @abstractmethod
    def attend(self, q_BTHD: torch.Tensor, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor) -> torch.Tensor:
        """[B, T, H, D] of this rank's tokens, from its own queries, keys and values. Every rank must call it."""


class Segment(NamedTuple):
    """Consecutive tokens of one document on one rank."""

    row: int
    """Row of the batch."""
    document: int
    """Position in the row where the document starts."""
    positions: range
    """Positions in the row that the segment covers."""
    place: int
    """Where its first token stands among the rank's flattened tokens."""


def segments(cu_seqlens: Sequence[int], parts: RowParts, rank: int) -> Iterator[Segment]:
    """The documents' parts on `rank`, in the order of its flattened tokens."""
    rows = cu_seqlens[-1] // parts.row_tokens
    documents: list[list[range]] = [[] for _ in range(rows)]
    for start, end in pairwise(cu_seqlens):
        row, first = divmod(start, parts.row_tokens)
        documents[row].append(range(first, first + end - start))
    place = 0
    for row in range(rows):
        for span in parts.spans(rank):
            for document in documents[row]:
                if common := overlap(document, span):
                    yield Segment(row, document.start, common, place)
                    place += len(common)


def overlap(a: range, b: range) -> range:
    """What two ranges have in common, empty if nothing."""
    return range(max(a.start, b.start), max(a.start, b.start, min(a.stop, b.stop)))


class Pairs(NamedTuple):
    """N pairs of runs of queries and of keys, each pair to be attended by itself. No query occurs twice."""

    queries: torch.Tensor
    """int64 [N, Q] places of the queries among flattened tokens."""
    keys: torch.Tensor
    """int64 [N, K] places of the keys."""
    is_causal: bool
    """The last query stands at the last key and sees all keys, each query before it one less. Else all see all."""


def grouped(runs: Iterable[tuple[range, range]], *, is_causal: bool, device: torch.device) -> list[Pairs]:
    """Runs of (query places, key places), those of equal sizes together."""
    by_size: dict[tuple[int, int], list[tuple[range, range]]] = {}
    for queries, keys in runs:
        by_size.setdefault((len(queries), len(keys)), []).append((queries, keys))

    def places(runs: Iterable[range]) -> torch.Tensor:
        return torch.stack([torch.arange(run.start, run.stop) for run in runs]).to(device)

    return [Pairs(*map(places, zip(*same, strict=True)), is_causal) for same in by_size.values()]
