"""The package megatron-core, which the format and the samples are compared with."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of extensions for CUDA that are not installed
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.components.data.indexed.pairs import EOD

SPLITS = ("train", "valid", "test")


def write_pair(
    prefix: Path,
    documents: Sequence[Sequence[int]],
    dtype=np.int32,
    lengths: Sequence[Sequence[int]] | None = None,
    modes: Sequence[Sequence[int]] | None = None,
) -> str:
    """Writes each document as one sequence, or as the `lengths` say."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=modes is not None)
    for number, document in enumerate(documents):
        own_lengths = lengths[number] if lengths else [len(document)] if document else []
        builder.add_document(document, own_lengths, modes[number] if modes else None)
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def build(
    prefixes: Sequence[str],
    cache: Path,
    *,
    weights: Sequence[float] | None = None,
    seq_len: int = 4,
    seed: int = 7,
    split: str = "1",
    split_name: str = "train",
    num_samples: int | None = None,
    pad: int = -1,
    **flags: bool,
):
    """What Megatron trains on: a GPTDataset of one pair, a BlendedDataset of several."""
    tokenizer = SimpleNamespace(vocab_size=1000, eod=EOD, pad=pad, unique_identifiers={"class": "test"})
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_len,
        blend=(list(prefixes), None if weights is None else list(weights)),
        split=split,
        path_to_cache=None if len(prefixes) > 1 or weights else str(cache),
        tokenizer=tokenizer,
        **{"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False} | flags,
    )
    sizes = [num_samples] * 3
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[SPLITS.index(split_name)]


def as_ours(item: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A sample with -100 for a label where Megatron has a loss mask."""
    return {
        "input_ids": item["tokens"],
        "labels": torch.where(item["loss_mask"].bool(), item["labels"], -100),
        "position_ids": item["position_ids"],
    }
