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

from hyper_parallel.components.data.documents import Document, TokenizedDocuments
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
        self._row_order: tuple[int, npt.NDArray[np.int64]] | None = None

    def take(self, samples_B: npt.NDArray[np.int64]) -> PackedRows:
        """The rows of the given samples, which may lie in several epochs."""
        epochs_B, places_B = np.divmod(samples_B, self.rows_per_epoch)
        # Samples ascend, so the rows of each epoch are one run and concatenation keeps the order.
        parts = [self.take_in_epoch(int(epoch), places_B[epochs_B == epoch]) for epoch in np.unique(epochs_B)]
        return PackedRows(*map(np.concatenate, zip(*parts, strict=True)))

    def take_in_epoch(self, epoch: int, places_B: npt.NDArray[np.int64]) -> PackedRows:
        """The rows at the given places of one epoch."""
        if self._row_order is None or self._row_order[0] != epoch:
            self._row_order = (epoch, epoch_permutation("rows", self.rows_per_epoch, self._seed, epoch))
        return self._rows(epoch, self._row_order[1][places_B])

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens in the rows of one pass over the documents, without padding."""
        return self.rows_per_epoch * self._seq_len

    def left_over(self, epoch: int) -> list[Document]:
        """What the rows of `epoch` leave out."""
        return []

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
        trained_BT = goes_on_BT
        if self._documents.trained is not None:
            trained_BT = goes_on_BT & self._documents.trained[(places + shifts[nth])[:, 1:]]
        return PackedRows(tokens[:, :-1], np.where(trained_BT, tokens[:, 1:], IGNORE_INDEX), segment_starts_BT)

    def left_over(self, epoch: int) -> list[Document]:
        starts, shifts = self._epoch_stream(epoch)
        documents, first = self._documents, self.rows_per_epoch * self._seq_len
        rest = []
        for d in range(max(0, np.searchsorted(starts, first, side="right") - 1), len(starts)):
            end = starts[d + 1] if d + 1 < len(starts) else len(documents.token_ids)
            part = slice(max(starts[d], first) + shifts[d], end + shifts[d])
            trained = None if documents.trained is None else documents.trained[part]
            rest.append(Document(documents.token_ids[part], trained))
        return rest

    def _epoch_stream(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(where each document starts in the epoch's stream, how far from there its tokens lie in memory)."""
        if self._stream is None or self._stream[0] != epoch:
            lengths = self._documents.lengths
            order = epoch_permutation("documents", len(lengths), self._seed, epoch)
            starts = np.cumsum(lengths[order]) - lengths[order]
            self._stream = (epoch, starts, self._documents.offsets[order] - starts)
        return self._stream[1:]


class Pieces(NamedTuple):
    """Parts of documents of at most T inputs: all but the last of a document are of T."""

    starts: npt.NDArray[np.int64]
    """[pieces]: where each begins in the documents' token ids."""
    lengths: npt.NDArray[np.int64]
    """[pieces]: inputs of each. The label of the last one is the token behind it."""


def cut_into_pieces(documents: TokenizedDocuments, seq_len: int) -> Pieces:
    """The documents, those of more than `seq_len` inputs in several pieces; no token is lost."""
    inputs = np.maximum(documents.lengths - 1, 0)  # the last token of a document is a label only
    per_document = -(-inputs // seq_len)
    first = np.cumsum(per_document) - per_document
    consumed = (np.arange(per_document.sum()) - np.repeat(first, per_document)) * seq_len
    return Pieces(
        np.repeat(documents.offsets[:-1], per_document) + consumed,
        np.minimum(np.repeat(inputs, per_document) - consumed, seq_len),
    )


class PadPacking(Packing):
    """One document a row, padded; a document of more than T tokens fills several rows, none of its tokens is lost.

    Padding is a segment of its own with labels -100: what is real is known by length, never by the pad id.
    """

    def __init__(self, documents: TokenizedDocuments, *, seq_len: int, pad_id: int, seed: int | None) -> None:
        super().__init__(documents, seq_len=seq_len, pad_id=pad_id, seed=seed)
        self._pieces = cut_into_pieces(documents, seq_len)
        self.rows_per_epoch = len(self._pieces.starts)

    @property
    def tokens_per_epoch(self) -> int:
        return int(self._pieces.lengths.sum())

    def _rows(self, epoch: int, rows_B: npt.NDArray[np.int64]) -> PackedRows:
        return gather(self._documents, self._pieces, rows_B[:, None], self._seq_len, self._pad_id)


def gather(
    documents: TokenizedDocuments, pieces: Pieces, numbers_BN: npt.NDArray[np.int64], seq_len: int, pad_id: int
) -> PackedRows:
    """Rows of up to N pieces one after the other, and padding behind them, a segment of its own.

    Args:
        numbers_BN: which pieces stand in each row; -1 for none, behind the others.
    """
    columns_T, last = np.arange(seq_len), numbers_BN.shape[1] - 1
    lengths_BN = np.where(numbers_BN >= 0, pieces.lengths[numbers_BN], 0)
    ends_BN = np.cumsum(lengths_BN, axis=1)
    # The piece of each token, by its place in the row: beyond the last one for padding.
    nth_BT = np.stack([np.searchsorted(ends_N, columns_T, side="right") for ends_N in ends_BN])
    real_BT, nth_BT = nth_BT <= last, np.minimum(nth_BT, last)
    offset_BT = columns_T - np.take_along_axis(ends_BN - lengths_BN, nth_BT, axis=1)
    piece_BT = np.take_along_axis(numbers_BN, nth_BT, axis=1)
    # Beyond a row's length any index in range will do: the value is replaced.
    places_BT = np.where(real_BT, pieces.starts[piece_BT] + offset_BT, 0)
    token_ids, trained_BT = documents.token_ids, real_BT
    if documents.trained is not None:
        trained_BT = real_BT & documents.trained[places_BT + 1]
    segment_starts_BT = (columns_T == 0) | (real_BT & (offset_BT == 0)) | (columns_T == ends_BN[:, -1:])
    return PackedRows(
        np.where(real_BT, token_ids[places_BT], pad_id).astype(np.int64),
        np.where(trained_BT, token_ids[places_BT + 1].astype(np.int64), IGNORE_INDEX),
        segment_starts_BT,
    )
