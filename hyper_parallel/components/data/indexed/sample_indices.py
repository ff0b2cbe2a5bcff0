"""Which tokens make up each sample, in which order: bit for bit what Megatron-LM's GPTDataset draws.

Samples are windows of ``seq_len + 1`` tokens over the sequences in a shuffled order, each beginning with the last token
of the one before. The sequences of all epochs but a short last one are shuffled together, and so are the samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_SHORT_EPOCH = 0.80  # a last epoch of which less than this is needed is shuffled by itself


class SampleIndices(NamedTuple):
    """D sequences over all epochs, n samples."""

    document_index: npt.NDArray[Any]
    """[D]: the sequences in the order in which they are read. Megatron's name: most documents are one sequence."""
    sample_index: npt.NDArray[Any]
    """[n + 1, 2]: place in `document_index` and token in that sequence where each window begins; the last entry is
    where the last window ends."""
    shuffle_index: npt.NDArray[Any]
    """[n]: the window that is sample k."""


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """What shapes the indices, but for the lengths of the sequences."""

    first: int
    """The sequences from this one ..."""
    last: int
    """... up to this one."""
    tokens: int
    """In all of them together."""
    seq_len: int
    seed: int
    epochs: int
    """Passes over the sequences: the fewest that give the samples asked for."""
    separate_last_epoch: bool
    """Whether the last epoch is shuffled by itself."""
    drop_last: bool
    """Whether a last window with fewer tokens is left out."""

    @classmethod
    def of(
        cls,
        lengths: npt.NDArray[np.int32],
        first: int,
        last: int,
        *,
        seq_len: int,
        seed: int,
        num_samples: int | None,
        drop_last: bool,
    ) -> SamplePlan:
        """The plan for at least `num_samples` samples, or for one epoch, of the sequences `first` up to `last`."""
        tokens = int(lengths[first:last].sum(dtype=np.int64))
        epochs, separate = 1, False
        if num_samples is not None and tokens:
            epochs = max(1, -(-(num_samples * seq_len + 1) // tokens))
        if num_samples is not None and epochs > 1:
            of_last_epoch = num_samples - ((epochs - 1) * tokens - 1) // seq_len
            separate = of_last_epoch < int(_SHORT_EPOCH * ((tokens - 1) // seq_len))
        return cls(first, last, tokens, seq_len, seed, epochs, separate, drop_last)

    @property
    def num_samples(self) -> int:
        """Of all epochs."""
        inputs = max(0, self.epochs * self.tokens - 1)  # the last token is a label only
        return inputs // self.seq_len if self.drop_last else -(-inputs // self.seq_len)

    def build(self, lengths: npt.NDArray[np.int32]) -> SampleIndices:
        """The indices; `lengths` [sequences] are the tokens of each sequence of the data."""
        random = np.random.RandomState(self.seed)  # the order of the three draws is part of the format
        document_index = self._document_index(random)
        sample_index = self._sample_index(lengths[document_index])
        together = self.num_samples
        if self.separate_last_epoch:
            together = ((self.epochs - 1) * self.tokens - 1) // self.seq_len
        shuffle_index = np.arange(self.num_samples, dtype=np.uint32 if self.num_samples < 2**32 - 2 else np.int64)
        random.shuffle(shuffle_index[:together])
        random.shuffle(shuffle_index[together:])
        return SampleIndices(document_index, sample_index, shuffle_index)

    def _document_index(self, random: np.random.RandomState) -> npt.NDArray[Any]:
        sequences = np.arange(self.first, self.last, dtype=np.int32 if self.last < 2**31 else np.int64)
        index = np.tile(sequences, self.epochs)
        together = len(index) - len(sequences) if self.separate_last_epoch else len(index)
        random.shuffle(index[:together])
        random.shuffle(index[together:])
        return index

    def _sample_index(self, lengths: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
        """`lengths` [D], in the order in which the sequences are read."""
        ends = np.cumsum(lengths, dtype=np.int64)
        starts = np.arange(self.num_samples + 1) * self.seq_len
        starts[-1] = min(starts[-1], ends[-1] - 1)  # a last window with fewer tokens ends with the data
        places = np.searchsorted(ends, starts, side="right")
        index = np.empty((len(starts), 2), np.int32 if len(lengths) < 2**31 else np.int64)
        index[:, 0] = places
        index[:, 1] = starts - (ends[places] - lengths[places])
        return index
