"""Several data sets as one, by weight: bit for bit what Megatron-LM's BlendedDataset draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hyper_parallel.components.data.indexed.pair_format import pair_paths
from hyper_parallel.config.errors import ConfigError

BlendSpec = str | Path | Sequence[str | Path | float | Sequence[str | Path | float]]

_SURPLUS = 0.005  # Megatron builds this share of samples more than it means to take from each data set


class Blend(NamedTuple):
    """Data sets and how much of each is taken."""

    prefixes: list[str]
    weights: list[float] | None
    """Add up to 1. None: every sample of each data set once."""

    @classmethod
    def parse(cls, spec: BlendSpec) -> Blend:
        """Reads ``"prefix"``, ``"0.7 prefix 0.3 prefix"``, ``"prefix prefix"``, the same as a list, or a list of pairs.

        Raises:
            ConfigError: it is none of these, or a weight is not a positive number.
        """
        if isinstance(spec, Path) or (isinstance(spec, str) and pair_paths(spec).idx.exists()):
            return cls([str(spec)], None)  # a prefix may hold blanks
        words: list[str] = []
        for part in spec.split() if isinstance(spec, str) else spec:
            if isinstance(part, str | Path | int | float):
                words.append(str(part))
            elif len(part) == 2:
                # Which of the two is the weight shows in the value.
                words += sorted(map(str, part), key=lambda word: _weight(word) is None)
            else:
                raise _fault(spec, f"{part!r} is no pair of a weight and a prefix")
        weights = [_weight(word) for word in words[::2]]
        if len(words) % 2 or not any(weight is not None for weight in weights):
            if not words or any(_weight(word) is not None for word in words):
                raise _fault(spec, "weights and prefixes do not alternate")
            return cls(words, None)
        for word, weight in zip(words[::2], weights, strict=True):
            if weight is None:
                raise _fault(spec, f"{word!r} stands where a weight should")
            if not 0 < weight < math.inf:
                raise _fault(spec, f"the weight {word} is not a positive number")
        normal = np.array(weights, np.float64)
        return cls(words[1::2], (normal / normal.sum()).tolist())

    def samples_of_each(self, num_samples: int) -> list[int]:
        """How many samples are taken of each data set, in about `num_samples` of them all."""
        return [math.ceil(num_samples * weight) for weight in self.weights or ()]


def samples_to_build(taken: int, drawn: int) -> int:
    """Samples that a data set must have for `taken` of the blend, of which the order draws `drawn`."""
    return max(math.ceil(taken * (1 + _SURPLUS)), drawn)


def blend_order(weights: Sequence[float], limits: Sequence[int] | None, size: int) -> npt.NDArray[np.int16]:
    """[size]: the data set of each sample: the one that is furthest behind its weight, the first of equals.

    With `limits`, a data set that has given that many samples gives no more.
    """
    order = np.empty(size, np.int16)
    counts = [0] * len(weights)
    running = list(range(len(weights)))
    for step in range(size):
        scale = max(step, 1)
        behind, chosen = -math.inf, -1
        for i in running:
            deficit = weights[i] * scale - counts[i]
            if deficit > behind:
                behind, chosen = deficit, i
        order[step] = chosen
        counts[chosen] += 1
        if limits is not None and counts[chosen] == limits[chosen]:
            running.remove(chosen)
    return order


def places_within(order: npt.NDArray[np.int16], datasets: int) -> npt.NDArray[np.int64]:
    """[size]: how many samples of the same data set come before each sample of `order`."""
    places = np.empty(len(order), np.int64)
    for i in range(datasets):
        mine = order == i
        places[mine] = np.arange(np.count_nonzero(mine))
    return places


def _weight(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _fault(spec: BlendSpec, fact: str) -> ConfigError:
    return ConfigError.one(
        "prefix", f"{fact} in {spec!r}", 'give "prefix", "0.7 prefix 0.3 prefix" or a list of pairs (weight, prefix)'
    )
