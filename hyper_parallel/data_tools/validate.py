"""Checks a pair to the last token."""

from __future__ import annotations

import argparse

import numpy as np
from tqdm import tqdm

from hyper_parallel.components.data.indexed.indexed_dataset import IndexedDataset
from hyper_parallel.config.errors import ConfigError

_CHUNK_TOKENS = 1 << 22


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The tool's command line."""
    parser.add_argument("prefix", metavar="PREFIX")
    vocabulary = parser.add_mutually_exclusive_group()
    vocabulary.add_argument("--tokenizer", metavar="FOLDER", help="refuse ids that this tokenizer does not have")
    vocabulary.add_argument("--vocab-size", type=int, metavar="N", help="refuse ids from N on")


def run(arguments: argparse.Namespace) -> None:
    """Reads all of the pair.

    Raises:
        ConfigError: the two files disagree, or an id is negative or not in the vocabulary.
    """
    dataset = IndexedDataset(arguments.prefix)
    vocab_size = arguments.vocab_size
    if arguments.tokenizer is not None:
        from hyper_parallel.data_tools.fast_tokenizer import FastTokenizer

        vocab_size = FastTokenizer(arguments.tokenizer).vocab_size
    least, most = 0, 0
    for start in tqdm(range(0, len(dataset.tokens), _CHUNK_TOKENS), unit="chunk", disable=None):
        chunk = dataset.tokens[start : start + _CHUNK_TOKENS]
        least, most = min(least, chunk.min()), max(most, chunk.max())
        if least < 0 or (vocab_size is not None and most >= vocab_size):
            place = start + int(np.argmax((chunk < 0) | (chunk >= (vocab_size or np.inf))))
            document = int(np.searchsorted(dataset.document_offsets, place, side="right")) - 1
            raise ConfigError.one(
                f"{arguments.prefix}.bin",
                f"holds the token id {dataset.tokens[place]} in document {document}, outside of a vocabulary of "
                f"{'any size' if vocab_size is None else vocab_size}",
                "prepare the data with the tokenizer of the model",
            )
    lengths = np.diff(dataset.document_offsets)
    print(
        f"{arguments.prefix}: {len(dataset):,} documents ({np.count_nonzero(lengths == 0):,} empty), "
        f"{len(dataset.sequence_lengths):,} sequences, {len(dataset.tokens):,} tokens of {dataset.dtype}, "
        f"largest id {most}"
    )
