"""The order of an epoch, from (seed, epoch) alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

_STREAMS = ("documents", "rows")


# A few permutations live on: those of documents and rows in the present epoch and, at its edge, in the next.
@lru_cache(maxsize=8)
def epoch_permutation(
    stream: Literal["documents", "rows"], size: int, seed: int | None, epoch: int
) -> npt.NDArray[np.int64]:
    """[size] indices in the order of `epoch`, read-only; in ascending order when `seed` is None.

    Sorting the raw output of a counter-based generator keyed by (seed, epoch) gives the same permutation on every
    platform and numpy version: raw Philox output is fixed by its definition (Salmon et al., "Parallel random numbers:
    as easy as 1, 2, 3", 2011), while numpy's own shuffle may change between versions.
    """
    if seed is None:
        permutation = np.arange(size)
    else:
        key = np.array([seed, epoch], np.uint64)
        counter = np.array([0, 0, 0, _STREAMS.index(stream)], np.uint64)
        permutation = np.argsort(np.random.Philox(key=key, counter=counter).random_raw(size), kind="stable")
    permutation.flags.writeable = False
    return permutation
