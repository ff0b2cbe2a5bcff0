"""Rows of `seq_len` tokens out of documents of any length.

T is `seq_len`, B a number of rows. A *segment* is the part of one document that stands in one row; tokens attend
within their segment only. Labels are aligned with logits: the label of a position is the next token of its document,
shifted here and nowhere else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hyper_parallel.components.data.documents import TokenizedDocuments
from hyper_parallel.components.data.order import epoch_permutation

IGNORE_INDEX = -100
"""Label of a position that is not trained."""


class PackedRows(NamedTuple):
    """B rows."""

    input_ids_BT: npt.NDArray[np.int64]
    labels_BT: npt.NDArray[np.int64]
    segment_starts_BT: npt.NDArray[np.bool_]
    """True at the first token of each segment, so in column 0 always."""


class Packing(ABC):
    """An endless sequence of rows: sample g is at place ``g % rows_per_epoch`` of epoch ``g // rows_per_epoch``."""

    rows_per_epoch: int
    """Rows of one pass over the documents, whatever their order."""

    def __init__(self, documents: TokenizedDocuments, *, seq_len: int, pad_id: int, seed: int | None) -> None:
        """`seed` keys the order of every epoch; None keeps the order of the file."""
        self._documents = documents
        self._seq_len = seq_len
        self._pad_id = pad_id
        self._seed = seed

    def take(self, samples_B: npt.NDArray[np.int64]) -> PackedRows:
        """The rows of the given samples, which may lie in several epochs."""
        epochs_B, places_B = np.divmod(samples_B, self.rows_per_epoch)
        # Samples ascend, so the rows of each epoch are one run and concatenation keeps the order.
        parts = [self._take_in_epoch(int(epoch), places_B[epochs_B == epoch]) for epoch in np.unique(epochs_B)]
        return PackedRows(*map(np.concatenate, zip(*parts, strict=True)))

    def _take_in_epoch(self, epoch: int, places_B: npt.NDArray[np.int64]) -> PackedRows:
        return self._rows(epoch, epoch_permutation("rows", self.rows_per_epoch, self._seed, epoch)[places_B])

    @abstractmethod
    def _rows(self, epoch: int, rows_B: npt.NDArray[np.int64]) -> PackedRows:
        """Rows by their number before they are shuffled."""


class ConcatPacking(Packing):
    """Documents in the epoch's order, one after the other, cut into rows of T tokens; no position is wasted.

    A document cut by the end of a row goes on in the next row as a new segment, at position 0. What the last row of
    an epoch cannot fill, fewer than T tokens, is left out of that epoch; other documents stand there in the next.
    """

    def __init__(self, documents: TokenizedDocuments, *, seq_len: int, pad_id: int, seed: int | None) -> None:
        super().__init__(documents, seq_len=seq_len, pad_id=pad_id, seed=seed)
        # The last token of a row is the label of the one before, so the rows' windows of T + 1 tokens overlap by one.
        self.rows_per_epoch = max(0, len(documents.token_ids) - 1) // seq_len
        self._stream: tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None

    def _rows(self, epoch: int, rows_B: npt.NDArray[np.int64]) -> PackedRows:
        starts, shifts = self._epoch_stream(epoch)
        places = rows_B[:, None] * self._seq_len + np.arange(self._seq_len + 1)  # [B, T + 1], in the epoch's stream
        nth = np.searchsorted(starts, places, side="right") - 1  # the document of each token, counted in stream order
        tokens = self._documents.token_ids[places + shifts[nth]].astype(np.int64)
        goes_on_BT = nth[:, 1:] == nth[:, :-1]  # the next token belongs to the same document
        segment_starts_BT = np.ones_like(goes_on_BT)
        segment_starts_BT[:, 1:] = ~goes_on_BT[:, :-1]
        return PackedRows(tokens[:, :-1], np.where(goes_on_BT, tokens[:, 1:], IGNORE_INDEX), segment_starts_BT)

    def _epoch_stream(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(where each document starts in the epoch's stream, how far from there its tokens lie in memory)."""
        if self._stream is None or self._stream[0] != epoch:
            lengths = self._documents.lengths
            order = epoch_permutation("documents", len(lengths), self._seed, epoch)
            starts = np.cumsum(lengths[order]) - lengths[order]
            self._stream = (epoch, starts, self._documents.offsets[order] - starts)
        return self._stream[1:]


class PadPacking(Packing):
    """One document a row, padded; a document of more than T tokens fills several rows, none of its tokens is lost.

    Padding is a segment of its own with labels -100: what is real is known by length, never by the pad id.
    """

    def __init__(self, documents: TokenizedDocuments, *, seq_len: int, pad_id: int, seed: int | None) -> None:
        super().__init__(documents, seq_len=seq_len, pad_id=pad_id, seed=seed)
        inputs = documents.lengths - 1  # the last token of a document is a label only
        rows_per_document = -(-inputs // seq_len)
        first_rows = np.cumsum(rows_per_document) - rows_per_document
        self.rows_per_epoch = int(rows_per_document.sum())
        consumed = (np.arange(self.rows_per_epoch) - np.repeat(first_rows, rows_per_document)) * seq_len
        self._row_starts = np.repeat(documents.offsets[:-1], rows_per_document) + consumed
        self._row_lengths = np.minimum(np.repeat(inputs, rows_per_document) - consumed, seq_len)

    def _rows(self, epoch: int, rows_B: npt.NDArray[np.int64]) -> PackedRows:
        columns_T = np.arange(self._seq_len)
        lengths_B1 = self._row_lengths[rows_B][:, None]
        real_BT = columns_T < lengths_B1
        # Beyond a row's length any index in range will do: the value is replaced.
        places_BT = np.where(real_BT, self._row_starts[rows_B][:, None] + columns_T, 0)
        token_ids = self._documents.token_ids
        return PackedRows(
            np.where(real_BT, token_ids[places_BT], self._pad_id).astype(np.int64),
            np.where(real_BT, token_ids[places_BT + 1].astype(np.int64), IGNORE_INDEX),
            (columns_T == 0) | (columns_T == lengths_B1),
        )


PACKINGS: dict[str, type[Packing]] = {"concat": ConcatPacking, "pad": PadPacking}
