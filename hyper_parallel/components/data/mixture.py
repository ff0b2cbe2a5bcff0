"""Rows of several sources, by weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from hyper_parallel.components.data.order import random_numbers
from hyper_parallel.components.data.packing import PackedRows, Packing
from hyper_parallel.config.errors import ConfigError

Stopping = Literal["repeat", "first_exhausted", "all_exhausted"]


class Mixture:
    """An endless sequence of rows, each of one source, as `Packing.take` numbers them.

    An epoch has a fixed number of rows of each source, spread evenly with some chance: row i of the n of a source lies
    in the i-th of n equal parts of the epoch. So any stretch of it has the sources' shares, and what is next follows
    from (seed, number of rows taken) alone. Where the epoch ends, the names of `datasets.interleave_datasets` say:

    - ``first_exhausted``: where a source would end first; then all begin anew, in another order
    - ``all_exhausted``: where each has been read as a whole; shorter ones have begun again before
    - ``repeat``: after as many rows as all sources have together; then each goes on where it stood
    """

    def __init__(
        self, packings: Sequence[Packing], shares: Sequence[float], *, stopping: Stopping, seed: int | None
    ) -> None:
        """`shares` are in proportion to the rows wanted of each source.

        Raises:
            ConfigError: a share is so small that an epoch has no row of its source.
        """
        rows = np.array([packing.rows_per_epoch for packing in packings])
        rates = np.array(shares) / sum(shares)
        if stopping == "repeat":
            counts = _whole_parts(rates * rows.sum())
        elif stopping == "first_exhausted":
            counts = np.floor(rates * (rows / rates).min() + 1e-9).astype(np.int64)
        else:
            counts = np.ceil(rates * (rows / rates).max() - 1e-9).astype(np.int64)
        if not counts.all():
            source = int(np.flatnonzero(counts == 0)[0])
            fact = f"an epoch of {counts.sum()} rows holds none of source {source}, whose share is {rates[source]:.2g}"
            raise ConfigError.one("dataloader.weights", fact, "give it more weight, or leave it out")
        self._packings = packings
        self.rows_of_each: npt.NDArray[np.int64] = counts
        """Rows of each source in an epoch."""
        # What a source has taken before an epoch: all of its earlier rows, or as many whole passes as it began.
        self._strides = counts if stopping == "repeat" else -(-counts // rows) * rows
        self._seed = seed
        self._order: tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None
        self.rows_per_epoch = int(counts.sum())

    def take(self, samples_B: npt.NDArray[np.int64]) -> PackedRows:
        """The rows of the given samples, which ascend and may lie in several epochs."""
        sources_B, own_B = self.sources_of(samples_B)
        rows: list[PackedRows] = []
        places: list[npt.NDArray[np.int64]] = []
        for source in np.unique(sources_B):
            chosen = np.flatnonzero(sources_B == source)
            rows.append(self._packings[source].take(own_B[chosen]))
            places.append(chosen)
        order = np.argsort(np.concatenate(places))
        return PackedRows(*(np.concatenate(part)[order] for part in zip(*rows, strict=True)))

    def sources_of(self, samples_B: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(the source of each sample, its number among the samples of that source)."""
        epochs_B, places_B = np.divmod(samples_B, self.rows_per_epoch)
        sources_B, own_B = np.empty_like(samples_B), np.empty_like(samples_B)
        for epoch in np.unique(epochs_B):
            here = epochs_B == epoch
            sources, numbers = self._epoch(int(epoch))
            sources_B[here] = sources[places_B[here]]
            own_B[here] = epoch * self._strides[sources_B[here]] + numbers[places_B[here]]
        return sources_B, own_B

    def _epoch(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """[rows]: (source, number among the rows of that source) in the order of the epoch."""
        if self._order is None or self._order[0] != epoch:
            total = self.rows_per_epoch
            chance = np.full(total, 0.5) if self._seed is None else random_numbers("mixture", total, self._seed, epoch)
            numbers = np.concatenate([np.arange(count) for count in self.rows_of_each])
            order = np.argsort((numbers + chance) / np.repeat(self.rows_of_each, self.rows_of_each), kind="stable")
            sources = np.repeat(np.arange(len(self.rows_of_each)), self.rows_of_each)
            self._order = (epoch, sources[order], numbers[order])
        return self._order[1:]


def _whole_parts(parts: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Whole numbers near `parts` of the same sum: those with the largest remainders are rounded up."""
    whole = np.floor(parts + 1e-9).astype(np.int64)
    missing = round(parts.sum()) - whole.sum()
    whole[np.argsort(whole - parts, kind="stable")[:missing]] += 1
    return whole
