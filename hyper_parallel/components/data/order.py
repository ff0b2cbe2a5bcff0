"""The order of an epoch, from (seed, epoch) alone."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Stream = Literal["documents", "rows", "mixture"]
_STREAMS = ("documents", "rows", "mixture")


def epoch_permutation(stream: Stream, size: int, seed: int | None, epoch: int) -> npt.NDArray[np.int64]:
    """[size] indices in the order of `epoch`; in ascending order when `seed` is None.

    Sorting the raw output of a counter-based generator keyed by (seed, epoch) gives the same permutation on every
    platform and numpy version: raw Philox output is fixed by its definition (Salmon et al., "Parallel random numbers:
    as easy as 1, 2, 3", 2011), while numpy's own shuffle may change between versions.
    """
    if seed is None:
        return np.arange(size)
    return np.argsort(_raw(stream, size, seed, epoch), kind="stable")


def random_numbers(stream: Stream, size: int, seed: int, epoch: int) -> npt.NDArray[np.float64]:
    """[size] numbers from 0 up to 1, as `epoch_permutation` draws them."""
    return (_raw(stream, size, seed, epoch) >> np.uint64(11)) * 2.0**-53


def _raw(stream: Stream, size: int, seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    key = np.array([seed, epoch], np.uint64)
    counter = np.array([0, 0, 0, _STREAMS.index(stream)], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(size)
