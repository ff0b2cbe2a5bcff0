"""Prints documents of a pair."""

from __future__ import annotations

import argparse

from hyper_parallel.components.data.indexed.indexed_dataset import IndexedDataset
from hyper_parallel.config.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The tool's command line."""
    parser.add_argument("prefix", metavar="PREFIX")
    parser.add_argument(
        "--documents", type=int, nargs="+", metavar="N", help="numbers of documents (default: the first three)"
    )
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of each document, at most (default: 64)")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="print text beside the ids")


def run(arguments: argparse.Namespace) -> None:
    """Prints what the pair holds, and the documents that are asked for.

    Raises:
        ConfigError: there is no such pair or document.
    """
    dataset = IndexedDataset(arguments.prefix)
    print(
        f"{arguments.prefix}: {len(dataset):,} documents, {len(dataset.sequence_lengths):,} sequences, "
        f"{len(dataset.tokens):,} tokens of {dataset.dtype}"
    )
    tokenizer = None
    if arguments.tokenizer is not None:
        from hyper_parallel.data_tools.fast_tokenizer import FastTokenizer

        tokenizer = FastTokenizer(arguments.tokenizer)
    for number in arguments.documents or range(min(3, len(dataset))):
        try:
            ids = dataset[number]
        except IndexError as error:
            remedy = f"give numbers below {len(dataset)}"
            raise ConfigError.one("--documents", f"{number} is no document of {arguments.prefix}", remedy) from error
        shown = ids[: arguments.tokens].tolist()
        more = f" and {len(ids) - len(shown)} more" if len(ids) > len(shown) else ""
        print(f"document {number}: {len(ids)} tokens: {' '.join(map(str, shown))}{more}")
        if tokenizer is not None:
            print(f"  {tokenizer.decode(shown)!r}")
