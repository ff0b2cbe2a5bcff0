"""Pairs on disk with tokens that are known."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hyper_parallel.components.data.indexed import GPTDataset, IndexedWriter

EOD = 0


def random_documents(count: int, *, seed: int = 0, longest: int = 40, ids: int = 1000) -> list[list[int]]:
    """Documents of 0 to `longest` ids from 1 on, each that is not empty ending in EOD."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, longest, count)
    return [[*random.integers(1, ids, length).tolist(), EOD] if length else [] for length in lengths]


def counted_documents(lengths: Sequence[int], first: int = 1) -> list[list[int]]:
    """Documents of the given lengths in which no id stands twice, so that an id tells its place."""
    ends = np.cumsum([first, *lengths]).tolist()
    return [list(range(*bounds)) for bounds in itertools.pairwise(ends)]


def write_pair(prefix: Path, documents: Sequence[Sequence[int]], dtype=np.int32) -> str:
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)


def samples(prefix, *, seq_len: int = 4, seed: int = 7, split: str = "1", split_name: str = "train", **options):
    return GPTDataset(
        prefix,
        **{"seq_len": seq_len, "seed": seed, "split": split, "split_name": split_name}
        | {"eod_token_id": EOD, "pad_token_id": -1}
        | options,
    )


def windows(dataset: GPTDataset) -> list[tuple[int, ...]]:
    """The tokens of every sample that has no masked label, in order."""
    return [(*item["input_ids"].tolist(), int(item["labels"][-1])) for item in dataset]
