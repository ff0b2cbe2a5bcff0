"""Documents of a packed batch, as runs of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import torch


class DocumentRun(NamedTuple):
    """Consecutive documents of one length, which one attention call can take as a batch."""

    count: int
    length_tokens: int


def document_runs(cu_seqlens: Sequence[int] | None, rows: int, row_tokens: int) -> list[DocumentRun]:
    """Runs of equal documents over the flattened batch. `cu_seqlens` None: each row is one document.

    Raises:
        ValueError: the boundaries do not start with 0, rise and end with rows x row_tokens, or leave out a row's end.
    """
    if cu_seqlens is None:
        return [DocumentRun(rows, row_tokens)]
    lengths = [end - start for start, end in pairwise(cu_seqlens)]
    total = rows * row_tokens
    if not lengths or cu_seqlens[0] != 0 or cu_seqlens[-1] != total or min(lengths) < 1:
        raise ValueError(
            f"cu_seqlens must start with 0, rise and end with B*T = {rows}*{row_tokens} = {total}; it is "
            f"{_shortened(cu_seqlens)}"
        )
    missing = sorted(set(range(0, total, row_tokens)) - set(cu_seqlens))
    if missing:
        raise ValueError(
            f"cu_seqlens {_shortened(cu_seqlens)} has a document that runs over the end of a row at {missing[0]} of "
            f"rows of {row_tokens} tokens; every multiple of {row_tokens} must be a boundary"
        )
    return [DocumentRun(len(list(same)), length) for length, same in groupby(lengths)]


def document_positions(cu_seqlens: Sequence[int] | None, rows: int, row_tokens: int, device: torch.device) -> torch.Tensor:
    """Position of each token in its document: [1, T] when each row is a document, else [B, T]."""
    if cu_seqlens is None:
        return torch.arange(row_tokens, device=device)[None]
    parts = [torch.arange(end - start) for start, end in pairwise(cu_seqlens)]
    return torch.cat(parts).view(rows, row_tokens).to(device)


def _shortened(numbers: Sequence[int]) -> str:
    shown = list(numbers)
    return str(shown) if len(shown) <= 12 else f"[{', '.join(map(str, shown[:6]))}, ..., {shown[-1]}]"
