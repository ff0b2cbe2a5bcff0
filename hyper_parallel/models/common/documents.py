"""Documents of a packed batch, grouped so that few attention calls take them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from hyper_parallel.protocols.module import Module

_PADDING_TOKENS = 16
_PADDING_SHARE = 8  # of the longest document of a group: at most an eighth


@dataclass(slots=True)  # not frozen: torch.compile would read all fields of one, and compile anew for each packing
class DocumentGroups:
    """Documents of like length as batches, each padded at its end to the longest.

    Padding needs no mask: under causal attention a token sees what stands before it, never what follows.
    """

    shapes: tuple[tuple[int, int], ...]
    """(documents, tokens of the longest) of each group."""
    gather: torch.Tensor
    """For each position of all groups in order: the token of the flattened batch that stands there; a padding repeats
    its document's last token."""
    scatter: torch.Tensor
    """For each token of the flattened batch: its position among the groups."""


class Rows(NamedTuple):
    """The tokens of a batch, and what each may see."""

    input_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    """[B or 1, T] position of each token in its document."""
    labels_BT: torch.Tensor | None
    documents: Any
    """What the attention of every layer is told: DocumentGroups, None where every row is one document, or what takes
    their place in a parallel plan."""
    row_tokens: int
    """Tokens of a whole row: T, unless ranks share rows."""


class WholeRows(Module):
    """Finds out what the layers need to know of a batch: a module, so that it has a boundary of its own."""

    def forward(
        self,
        input_ids_BT: torch.Tensor,
        position_ids_BT: torch.Tensor | None,
        cu_seqlens: Sequence[int] | None,
        labels_BT: torch.Tensor | None,
    ) -> Rows:
        rows, tokens = input_ids_BT.shape
        documents = document_groups(cu_seqlens, rows, tokens, input_ids_BT.device)
        if position_ids_BT is None:
            position_ids_BT = document_positions(cu_seqlens, rows, tokens, input_ids_BT.device)
        return Rows(input_ids_BT, position_ids_BT, labels_BT, documents, tokens)


def document_groups(
    cu_seqlens: Sequence[int] | None, rows: int, row_tokens: int, device: torch.device
) -> DocumentGroups | None:
    """Groups of the documents of a batch; None where each row is one document, as it is where `cu_seqlens` is None.

    Raises:
        ValueError: the boundaries do not start with 0, rise and end with rows x row_tokens, or leave out a row's end.
    """
    if cu_seqlens is None or len(cu_seqlens) == rows + 1:
        check_boundaries(cu_seqlens or range(0, rows * row_tokens + 1, row_tokens), rows, row_tokens)
        return None
    check_boundaries(cu_seqlens, rows, row_tokens)
    documents = sorted(((end - start, start) for start, end in pairwise(cu_seqlens)), reverse=True)
    shapes: list[list[int]] = []
    gather: list[torch.Tensor] = []
    scatter = torch.empty(rows * row_tokens, dtype=torch.int64)
    filled = 0
    for length, start in documents:
        if not shapes or shapes[-1][1] - length > max(_PADDING_TOKENS, shapes[-1][1] // _PADDING_SHARE):
            shapes.append([0, length])
        shapes[-1][0] += 1
        padded = shapes[-1][1]
        gather.append(torch.arange(start, start + padded).clamp_(max=start + length - 1))
        scatter[start : start + length] = torch.arange(filled, filled + length)
        filled += padded
    return DocumentGroups(
        tuple((count, length) for count, length in shapes), torch.cat(gather).to(device), scatter.to(device)
    )


def document_positions(
    cu_seqlens: Sequence[int] | None, rows: int, row_tokens: int, device: torch.device
) -> torch.Tensor:
    """Position of each token in its document: [1, T] when each row is a document, else [B, T]."""
    if cu_seqlens is None:
        return torch.arange(row_tokens, device=device)[None]
    parts = [torch.arange(end - start) for start, end in pairwise(cu_seqlens)]
    return torch.cat(parts).view(rows, row_tokens).to(device)


def check_boundaries(cu_seqlens: Sequence[int], rows: int, row_tokens: int) -> None:
    """
    Raises:
        ValueError: the boundaries do not start with 0, rise and end with rows x row_tokens, or leave out a row's end.
    """
    total = rows * row_tokens
    rising = all(start < end for start, end in pairwise(cu_seqlens))
    if len(cu_seqlens) < 2 or cu_seqlens[0] != 0 or cu_seqlens[-1] != total or not rising:
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


def _shortened(numbers: Sequence[int]) -> str:
    shown = list(numbers)
    return str(shown) if len(shown) <= 12 else f"[{', '.join(map(str, shown[:6]))}, ..., {shown[-1]}]"
